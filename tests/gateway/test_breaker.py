"""Decisions of the circuit breaker, over a manual clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from gateway.errors import CircuitOpen, RateLimited
from gateway.settings import BreakerSettings
from gateway.upstream.breaker import Breaker, Outcome, State, outcome_of, wait_until_one_admits
from gateway.upstream.deadline import Deadline
from workers.api.errors import (
    CacheNotFound,
    DeadlineExceeded,
    InvalidRequest,
    KvrelayError,
    ModelNotFound,
    Overloaded,
    TransferFailed,
    WorkerUnavailable,
)

SETTINGS = BreakerSettings(
    window=10, window_s=30.0, min_outcomes=4, failure_rate=0.5, open_s=2.0, jitter=0.0, num_probes=2, num_successes=2
)
GONE = WorkerUnavailable("gone")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> Breaker:
    return Breaker("large-0", SETTINGS, clock=clock)


def end(breaker: Breaker, *errors: BaseException | None) -> None:
    for error in errors:
        breaker.begin().end(error)


def open_circuit(breaker: Breaker) -> None:
    end(breaker, *[GONE] * 4)
    assert breaker.state is State.OPEN


def test_the_circuit_opens_at_the_failure_rate_after_the_minimum(breaker: Breaker) -> None:
    end(breaker, GONE, GONE, GONE)
    assert breaker.state is State.CLOSED, "three outcomes are below the minimum"
    end(breaker, GONE)
    assert breaker.state is State.OPEN
    with pytest.raises(CircuitOpen, match="large-0"):
        breaker.begin()


def test_the_circuit_stays_closed_below_the_failure_rate(breaker: Breaker) -> None:
    end(breaker, *[None, None, GONE] * 10)
    assert breaker.state is State.CLOSED


def test_old_failures_are_forgotten(breaker: Breaker, clock: Clock) -> None:
    end(breaker, GONE, GONE, GONE)
    clock.now += 31
    end(breaker, GONE)
    assert breaker.state is State.CLOSED


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequest("bad"),
        CacheNotFound("gone"),
        ModelNotFound("unknown"),
        RateLimited("too many requests"),
        Overloaded("full"),
        asyncio.CancelledError(),
        GeneratorExit(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_unrelated_to_health_are_neutral(breaker: Breaker, error: BaseException) -> None:
    end(breaker, *[error] * 50)
    assert breaker.state is State.CLOSED
    end(breaker, GONE, GONE, GONE)
    assert breaker.state is State.CLOSED, "neutral outcomes do not count towards the minimum"


@pytest.mark.parametrize("error", [GONE, DeadlineExceeded("late"), TransferFailed("x"), KvrelayError("bug"), OSError()])
def test_worker_errors_count_as_failures(error: BaseException) -> None:
    assert outcome_of(error) is Outcome.FAILURE


def test_half_open_admits_probes_and_rejects_further_calls(breaker: Breaker, clock: Clock) -> None:
    open_circuit(breaker)
    clock.now += 2.0
    breaker.begin()
    breaker.begin()
    assert not breaker.admits
    with pytest.raises(CircuitOpen):
        breaker.begin()


def test_two_successes_close_the_circuit(breaker: Breaker, clock: Clock) -> None:
    open_circuit(breaker)
    clock.now += 2.0
    end(breaker, None)
    assert breaker.state is State.HALF_OPEN
    end(breaker, None)
    assert breaker.state is State.CLOSED


def test_a_failed_probe_reopens_the_circuit(breaker: Breaker, clock: Clock) -> None:
    open_circuit(breaker)
    clock.now += 2.0
    end(breaker, None, GONE)
    assert breaker.state is State.OPEN
    clock.now += 1.9
    assert not breaker.admits


def test_a_cancelled_probe_frees_its_slot(breaker: Breaker, clock: Clock) -> None:
    open_circuit(breaker)
    clock.now += 2.0
    end(breaker, *[asyncio.CancelledError()] * 5)
    assert breaker.state is State.HALF_OPEN
    assert breaker.admits


async def test_a_waiter_takes_the_slot_of_a_cancelled_probe(breaker: Breaker, clock: Clock) -> None:
    open_circuit(breaker)
    clock.now += 2.0
    probes = [breaker.begin(), breaker.begin()]
    waiting = asyncio.create_task(wait_until_one_admits(lambda: [breaker], Deadline.after(5.0)))
    await asyncio.sleep(0)
    assert not waiting.done()
    probes[0].end(asyncio.CancelledError())
    assert await asyncio.wait_for(waiting, 1.0)
    assert breaker.admits


def test_calls_begun_before_opening_do_not_change_the_circuit(breaker: Breaker, clock: Clock) -> None:
    early = [breaker.begin() for _ in range(6)]
    open_circuit(breaker)
    clock.now += 2.0
    assert breaker.state is State.HALF_OPEN
    for attempt in early[:3]:
        attempt.end(None)
    assert breaker.state is State.HALF_OPEN, "they were not probes"
    early[3].end(GONE)
    assert breaker.state is State.HALF_OPEN


@pytest.mark.parametrize(("rng", "reopens_after"), [(lambda: 0.0, 1.6), (lambda: 1.0, 2.4)])
def test_the_open_time_is_jittered(clock: Clock, rng: Callable[[], float], reopens_after: float) -> None:
    breaker = Breaker("x", SETTINGS.model_copy(update={"jitter": 0.2}), clock=clock, rng=rng)
    open_circuit(breaker)
    clock.now += reopens_after - 0.01
    assert breaker.state is State.OPEN
    clock.now += 0.02
    assert breaker.state is State.HALF_OPEN


def test_a_stream_that_breaks_after_its_first_token_counts_as_a_failure(breaker: Breaker) -> None:
    for _ in range(2):
        attempt = breaker.begin()
        attempt.succeed()
        attempt.end(GONE)
    assert breaker.state is State.OPEN, "two successes and two failures"


def test_a_completed_stream_counts_once(breaker: Breaker) -> None:
    for _ in range(2):
        attempt = breaker.begin()
        attempt.succeed()
        attempt.end(None)
    end(breaker, GONE, GONE)
    assert breaker.state is State.OPEN, "two of four"


def test_a_failure_reported_twice_counts_once(breaker: Breaker) -> None:
    for _ in range(3):
        attempt = breaker.begin()
        attempt.end(GONE)
        attempt.end(GONE)
    assert breaker.state is State.CLOSED, "three outcomes are below the minimum"


def test_transitions_are_reported(clock: Clock) -> None:
    transitions: list[tuple[str, State]] = []
    breaker = Breaker("x", SETTINGS, clock=clock, on_transition=lambda target, to: transitions.append((target, to)))
    open_circuit(breaker)
    clock.now += 2.0
    end(breaker, None, None)
    assert transitions == [("x", State.OPEN), ("x", State.HALF_OPEN), ("x", State.CLOSED)]
