"""The circuit breaker's decisions, over a clock that the test turns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from gateway.errors import CircuitOpen, RateLimited
from gateway.upstream.breaker import Breaker, BreakerSettings, Outcome, State, outcome_of, wait_until_one_admits
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


def opened(breaker: Breaker) -> None:
    end(breaker, *[GONE] * 4)
    assert breaker.state is State.OPEN


def test_opens_at_the_rate_over_the_minimum(breaker: Breaker) -> None:
    end(breaker, GONE, GONE, GONE)
    assert breaker.state is State.CLOSED, "three outcomes say nothing yet"
    end(breaker, GONE)
    assert breaker.state is State.OPEN
    with pytest.raises(CircuitOpen, match="large-0"):
        breaker.begin()


def test_stays_closed_below_the_rate(breaker: Breaker) -> None:
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
        ModelNotFound("no such"),
        RateLimited("slower"),
        Overloaded("full"),
        asyncio.CancelledError(),
        GeneratorExit(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_says_nothing_of_health_is_neutral(breaker: Breaker, error: BaseException) -> None:
    end(breaker, *[error] * 50)
    assert breaker.state is State.CLOSED
    end(breaker, GONE, GONE, GONE)
    assert breaker.state is State.CLOSED, "neutral outcomes count towards no minimum either"


@pytest.mark.parametrize("error", [GONE, DeadlineExceeded("late"), TransferFailed("x"), KvrelayError("bug"), OSError()])
def test_what_counts_as_failure(error: BaseException) -> None:
    assert outcome_of(error) is Outcome.FAILURE


def test_half_open_admits_its_probes_and_rejects_the_rest_at_once(breaker: Breaker, clock: Clock) -> None:
    opened(breaker)
    clock.now += 2.0
    breaker.begin()
    breaker.begin()
    assert not breaker.admits
    with pytest.raises(CircuitOpen):
        breaker.begin()


def test_two_successes_close_it(breaker: Breaker, clock: Clock) -> None:
    opened(breaker)
    clock.now += 2.0
    end(breaker, None)
    assert breaker.state is State.HALF_OPEN
    end(breaker, None)
    assert breaker.state is State.CLOSED


def test_a_failed_probe_opens_it_again(breaker: Breaker, clock: Clock) -> None:
    opened(breaker)
    clock.now += 2.0
    end(breaker, None, GONE)
    assert breaker.state is State.OPEN
    clock.now += 1.9
    assert not breaker.admits


def test_a_cancelled_probe_gives_its_place_back(breaker: Breaker, clock: Clock) -> None:
    opened(breaker)
    clock.now += 2.0
    end(breaker, *[asyncio.CancelledError()] * 5)
    assert breaker.state is State.HALF_OPEN
    assert breaker.admits


async def test_who_waits_takes_the_place_that_a_cancelled_probe_gives_back(breaker: Breaker, clock: Clock) -> None:
    opened(breaker)
    clock.now += 2.0
    probes = [breaker.begin(), breaker.begin()]
    waiting = asyncio.create_task(wait_until_one_admits(lambda: [breaker], Deadline.after(5.0)))
    await asyncio.sleep(0)
    assert not waiting.done()
    probes[0].end(asyncio.CancelledError())
    assert await asyncio.wait_for(waiting, 1.0)
    assert breaker.admits


def test_a_call_from_before_it_opened_closes_nothing(breaker: Breaker, clock: Clock) -> None:
    early = [breaker.begin() for _ in range(6)]
    opened(breaker)
    clock.now += 2.0
    assert breaker.state is State.HALF_OPEN
    for attempt in early[:3]:
        attempt.end(None)
    assert breaker.state is State.HALF_OPEN, "they were no probes"
    early[3].end(GONE)
    assert breaker.state is State.HALF_OPEN


@pytest.mark.parametrize(("rng", "reopens_after"), [(lambda: 0.0, 1.6), (lambda: 1.0, 2.4)])
def test_the_open_time_is_jittered(clock: Clock, rng: Callable[[], float], reopens_after: float) -> None:
    breaker = Breaker("x", SETTINGS.model_copy(update={"jitter": 0.2}), clock=clock, rng=rng)
    opened(breaker)
    clock.now += reopens_after - 0.01
    assert breaker.state is State.OPEN
    clock.now += 0.02
    assert breaker.state is State.HALF_OPEN


def test_a_stream_that_breaks_after_its_first_token_counts(breaker: Breaker) -> None:
    for _ in range(2):
        attempt = breaker.begin()
        attempt.succeed()
        attempt.end(GONE)
    assert breaker.state is State.OPEN, "two successes and two failures"


def test_a_stream_that_ends_well_counts_once(breaker: Breaker) -> None:
    for _ in range(2):
        attempt = breaker.begin()
        attempt.succeed()
        attempt.end(None)
    end(breaker, GONE, GONE)
    assert breaker.state is State.OPEN, "two of four"


def test_a_failure_that_is_told_twice_counts_once(breaker: Breaker) -> None:
    for _ in range(3):
        attempt = breaker.begin()
        attempt.end(GONE)
        attempt.end(GONE)
    assert breaker.state is State.CLOSED, "three outcomes say nothing yet"


def test_transitions_are_told(clock: Clock) -> None:
    seen: list[tuple[str, State]] = []
    breaker = Breaker("x", SETTINGS, clock=clock, on_transition=lambda target, to: seen.append((target, to)))
    opened(breaker)
    clock.now += 2.0
    end(breaker, None, None)
    assert seen == [("x", State.OPEN), ("x", State.HALF_OPEN), ("x", State.CLOSED)]
