"""Requests that come while a worker's circuit is open or half open, and nobody else could serve them: they wait for the
trial's outcome, within their deadline and the tier's queue."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from gateway.errors import CircuitOpen
from gateway.upstream.breaker import Breaker, State
from gateway.upstream.fleet import Fleet
from gateway.upstream.worker import Worker
from tests.gateway.stack import LONG, MESSAGES, Stack, eventually, in_process, report, values
from tools.fake_worker import FakeWorker
from workers.api.errors import WorkerUnavailable

OPEN_S = 0.15
TRIAL_S = 0.1
NUM_TO_OPEN = 2
BREAKER = {"window": 4, "min_outcomes": NUM_TO_OPEN, "open_s": OPEN_S, "jitter": 0.0}
GONE = WorkerUnavailable("gone")

Ask = Callable[[Stack], Coroutine[Any, Any, httpx.Response]]


async def complete(stack: Stack) -> httpx.Response:
    return await stack.http.post("/v1/completions", json={"model": "large", "prompt": "once upon"})


async def prefill(stack: Stack) -> httpx.Response:
    return await stack.http.post("/v1/prefix/prefill", json={"messages": MESSAGES[:1], "target_model": "small"})


async def transfer(stack: Stack) -> httpx.Response:
    cache_id = (await prefill(stack)).json()["cache_id"]
    return await stack.http.post("/v1/cache/transfer", json={"cache_id": cache_id, "target_model": "large"})


# who asks -> (the worker that fails, the call that fails, how it is asked)
CALLERS: dict[str, tuple[str, str, Ask]] = {
    "large by name": ("large", "chat", lambda stack: stack.chat(model="large")),
    "small by name": ("small", "chat", lambda stack: stack.chat(model="small")),
    "text": ("large", "complete", complete),
    "prefill": ("small", "prefill", prefill),
    "transfer": ("large", "transfer", transfer),
}


async def opened(stack: Stack, caller: str) -> Ask:
    """The circuit that this caller's requests go through is open now; the worker has a trial's time from now on."""
    name, call, ask = CALLERS[caller]
    worker = getattr(stack, name)
    worker.fail(call, GONE)
    for _ in range(NUM_TO_OPEN):
        assert (await ask(stack)).status_code == 502
    worker.delay(call, TRIAL_S)
    worker.calls.clear()
    return ask


@pytest.mark.parametrize(
    ("caller", "pause_s"), [(name, 0.0) for name in CALLERS] + [("large by name", OPEN_S), ("transfer", OPEN_S)]
)
async def test_nobody_is_turned_away_while_a_trial_is_to_come_or_under_way(caller: str, pause_s: float) -> None:
    async with in_process(breaker=BREAKER) as stack:
        ask = await opened(stack, caller)
        await asyncio.sleep(pause_s)
        replies = await asyncio.gather(*(ask(stack) for _ in range(4)))
        assert [reply.status_code for reply in replies] == [200] * 4


@pytest.mark.parametrize("caller", CALLERS)
async def test_a_trial_that_fails_ends_the_waiting(caller: str) -> None:
    async with in_process(breaker=BREAKER | {"open_s": 0.4}) as stack:
        ask = await opened(stack, caller)
        name, call, _ = CALLERS[caller]
        getattr(stack, name).fail(call, GONE)
        replies = await asyncio.gather(*(ask(stack) for _ in range(4)))
        assert sorted(reply.status_code for reply in replies) == [502, 503, 503, 503]
        assert {reply.headers.get("retry-after") for reply in replies if reply.status_code == 503} == {"1"}
        assert len(getattr(stack, name).requests(call)) == 1, "one trial: no call beside it, and no wait for a second"


@pytest.mark.parametrize("caller", CALLERS)
async def test_a_circuit_that_stays_open_longer_than_the_request_may_take_fails_at_once(caller: str) -> None:
    async with in_process(breaker=BREAKER | {"open_s": 60.0}) as stack:
        ask = await opened(stack, caller)
        started = time.monotonic()
        assert (await ask(stack)).status_code == 503
        assert time.monotonic() - started < 2.0
        name, call, _ = CALLERS[caller]
        assert getattr(stack, name).requests(call) == []


async def test_who_waits_stands_in_the_tiers_queue() -> None:
    async with in_process(breaker=BREAKER | {"open_s": 0.6}, limits={"max_queue_per_tier": 2}) as stack:
        ask = await opened(stack, "large by name")
        asking = [asyncio.create_task(ask(stack)) for _ in range(5)]
        await eventually(lambda: stack.metric("num_requests_waiting", tier="large") == 2)
        assert stack.metric("num_requests_running", tier="large") == 0, "no place is held for nothing"
        replies = await asyncio.gather(*asking)
        assert sorted(reply.status_code for reply in replies) == [200, 200, 503, 503, 503]


async def test_a_tier_is_ready_while_its_trial_is_under_way() -> None:
    """No balancer need look elsewhere: who comes meanwhile is served."""
    async with in_process(breaker=BREAKER | {"open_s": 60.0}) as stack:
        await opened(stack, "large by name")
        assert await ready(stack) == {"small": True, "large": False}
    async with in_process(breaker=BREAKER) as stack:
        ask = await opened(stack, "large by name")
        trial = asyncio.create_task(ask(stack))
        await eventually(lambda: len(stack.large.requests("chat")) == 1)
        assert await ready(stack) == {"small": True, "large": True}
        assert (await trial).status_code == 200


async def ready(stack: Stack) -> object:
    return (await stack.http.get("/readyz")).json()["tiers"]


async def test_a_request_waits_no_longer_than_it_may_take() -> None:
    async with in_process(breaker=BREAKER, deadlines={"request_s": 0.6}) as stack:
        ask = await opened(stack, "large by name")
        stack.large.delay("chat", 30.0)
        started = time.monotonic()
        replies = await asyncio.gather(*(ask(stack) for _ in range(3)))
        assert sorted(reply.status_code for reply in replies) == [503, 503, 504]
        assert time.monotonic() - started < 3.0


async def test_where_another_model_can_answer_nobody_waits() -> None:
    async with in_process(breaker=BREAKER | {"open_s": 5.0}) as stack:
        stack.small.fail("prefill", GONE)
        for _ in range(NUM_TO_OPEN):
            await stack.chat()
        reply = await stack.chat()
        assert (report(reply)["path"], report(reply)["tier"]) == ("fallback:small_no_usable_worker", "large")
        assert stack.metric("circuit_transitions_total", target="small-0", to="half_open") == 0


async def test_the_small_model_is_waited_for_where_it_is_the_only_one() -> None:
    async with in_process(breaker=BREAKER) as stack:
        await gone(stack)
        stack.small.fail("prefill", GONE)
        for _ in range(NUM_TO_OPEN):
            assert (await stack.chat()).status_code == 503
        stack.small.delay("prefill", TRIAL_S)
        replies = await asyncio.gather(*(stack.chat() for _ in range(4)))
        assert [report(reply)["tier"] for reply in replies] == ["small"] * 4


async def test_an_exact_cache_is_waited_for_too() -> None:
    """It spares the full prefill, on the same circuit."""
    async with in_process(breaker=BREAKER) as stack:
        await stack.chat(model="large")
        stack.large.fail("cached_chat", GONE)
        stack.large.fail("chat", GONE)
        assert (await stack.chat(model="large")).status_code == 502
        stack.large.heal()
        replies = await asyncio.gather(*(stack.chat(model="large") for _ in range(4)))
        assert [report(reply)["path"] for reply in replies] == ["exact"] * 4


async def test_who_is_let_through_late_has_time_left_for_the_call() -> None:
    """Else its timeout would open the circuit again, for everybody."""
    async with in_process(breaker=BREAKER | {"open_s": 0.7}, deadlines={"request_s": 1.0}) as stack:
        ask = await opened(stack, "large by name")
        stack.large.delay("chat", 0.6)
        assert (await ask(stack)).status_code == 503
        assert stack.large.requests("chat") == [], "it would have had 0.3 s"


async def test_a_handed_over_cache_does_not_go_to_a_worker_whose_answers_fail() -> None:
    async with in_process(breaker=BREAKER) as stack:
        cache_id = (await prefill(stack)).json()["cache_id"]
        await opened(stack, "large by name")
        body = {"cache_id": cache_id, "target_model": "large"}
        assert (await stack.http.post("/v1/cache/transfer", json=body)).status_code == 503
        assert stack.large.requests("transfer") == []


async def test_a_handed_over_cache_waits_for_a_trial_of_the_workers_answers() -> None:
    async with in_process(breaker=BREAKER) as stack:
        cache_id = (await prefill(stack)).json()["cache_id"]
        await opened(stack, "large by name")
        await asyncio.sleep(OPEN_S)
        stack.large.heal()
        stack.large.delay("chat", 0.3)
        trial = asyncio.create_task(stack.chat(model="large"))
        await eventually(lambda: worker_of(stack, "large-0").breaker.state is State.HALF_OPEN)
        await eventually(lambda: not worker_of(stack, "large-0").breaker.admits)
        body = {"cache_id": cache_id, "target_model": "large"}
        assert (await stack.http.post("/v1/cache/transfer", json=body)).status_code == 200
        assert (await trial).status_code == 200


def fleet_of(stack: Stack) -> Fleet:
    fleet: Fleet = stack.app.state.gateway.parts.fleet
    return fleet


def worker_of(stack: Stack, name: str) -> Worker:
    worker = fleet_of(stack).worker(name)
    assert worker is not None
    return worker


def trip(circuit: Breaker) -> None:
    while circuit.state is State.CLOSED:
        circuit.begin().end(GONE)


async def drained(stack: Stack) -> None:
    worker_of(stack, "large-0").is_drained = True


async def gone(stack: Stack) -> None:
    stack.large.fail("readyz", GONE)
    await stack.check_health()
    await stack.check_health()


CALLS = {"answer": "chat", "own cache": "cached_chat", "transfer": "transfer"}


def circuit_of(worker: Worker, waits_for: str) -> Breaker:
    return worker.transfers if waits_for == "transfer" else worker.breaker


async def reply_of(stack: Stack, waits_for: str) -> httpx.Response:
    return await (transfer(stack) if waits_for == "transfer" else stack.chat(model="large"))


async def waiting_for(stack: Stack, waits_for: str) -> asyncio.Task[httpx.Response]:
    waiting = asyncio.create_task(reply_of(stack, waits_for))
    await eventually(lambda: stack.metric("num_requests_waiting", tier="large") == 1)
    return waiting


@pytest.mark.parametrize("leaves", [drained, gone])
@pytest.mark.parametrize("waits_for", CALLS)
async def test_who_waits_for_a_worker_that_leaves_is_told_at_once(
    waits_for: str, leaves: Callable[[Stack], Coroutine[Any, Any, None]]
) -> None:
    async with in_process(breaker=BREAKER | {"open_s": 4.0}) as stack:
        if waits_for == "own cache":
            await stack.chat(model="large")
        trip(circuit_of(worker_of(stack, "large-0"), waits_for))
        waiting = await waiting_for(stack, waits_for)
        await leaves(stack)
        assert (await asyncio.wait_for(waiting, 1.0)).status_code == 503


@asynccontextmanager
async def two_large(**changes: Any) -> AsyncIterator[tuple[Stack, FakeWorker]]:
    workers = values()["workers"] | {"large-1": {"tier": "large", "url": "http://large-1"}}
    other = FakeWorker("large-1", "fake-large")
    async with in_process({"large-1": httpx.ASGITransport(other)}, workers=workers, **changes) as stack:
        other.peers = stack.large.peers
        yield stack, other


@pytest.mark.parametrize("waits_for", ["answer", "transfer"])
async def test_whoever_of_a_tier_is_let_through_to_first_is_asked(waits_for: str) -> None:
    async with two_large(breaker=BREAKER | {"open_s": 0.8}) as (stack, other):
        for name in ("large-1", "large-0"):
            await asyncio.sleep(0.3)
            trip(circuit_of(worker_of(stack, name), waits_for))
        assert (await reply_of(stack, waits_for)).status_code == 200
        assert other.requests(CALLS[waits_for]) and not stack.large.requests(CALLS[waits_for])


@pytest.mark.parametrize("waits_for", ["answer", "transfer"])
async def test_who_comes_back_while_others_wait_is_asked(waits_for: str) -> None:
    async with two_large(breaker=BREAKER | {"open_s": 4.0}) as (stack, other):
        second = worker_of(stack, "large-1")
        second.is_drained = True
        trip(circuit_of(worker_of(stack, "large-0"), waits_for))
        waiting = await waiting_for(stack, waits_for)
        second.is_drained = False
        assert (await asyncio.wait_for(waiting, 1.0)).status_code == 200
        assert other.requests(CALLS[waits_for])


async def test_a_handoff_goes_to_whoever_takes_any() -> None:
    async with two_large(breaker=BREAKER | {"open_s": 60.0}) as (stack, other):
        trip(worker_of(stack, "large-0").transfers)
        assert report(await stack.escalate())["path"] == "mapped"
        assert other.requests("transfer")
        trip(worker_of(stack, "large-1").transfers)
        another = [{"role": "system", "content": f"Another document. {LONG}"}, MESSAGES[-1]]
        assert report(await stack.escalate(another))["path"] == "fallback:circuit_open"


@pytest.mark.parametrize(("method", "waits_for"), [("open_answer", "answer"), ("transfer", "transfer")])
async def test_a_call_that_loses_the_probe_to_another_chooses_again(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, method: str, waits_for: str
) -> None:
    worker, num_calls = worker_of(stack, "large-0"), 0
    real = getattr(worker, method)

    async def loses_once(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 1:
            raise CircuitOpen("another call took the probe")
        return await real(*args, **kwargs)

    monkeypatch.setattr(worker, method, loses_once)
    assert (await reply_of(stack, waits_for)).status_code == 200
    assert num_calls == 2


async def test_the_time_of_a_transfer_begins_behind_the_wait() -> None:
    async with in_process(breaker=BREAKER | {"open_s": 0.6}) as stack:
        trip(worker_of(stack, "large-0").transfers)
        assert (await transfer(stack)).status_code == 200
        assert stack.metric("handoff_duration_seconds_count") == 1
        assert stack.metric("handoff_duration_seconds_sum") < 0.5


async def test_a_question_about_an_answer_waits_too() -> None:
    async with in_process(breaker=BREAKER, policy={"name": "verifier", "question": "Right?"}) as stack:
        stack.small.canned_answers = {"Right?": "Yes"}
        await gone(stack)
        stack.small.stall("cached_chat", after=1)
        asking = asyncio.create_task(stack.chat())
        await eventually(lambda: len(stack.small.requests("cached_chat")) == 1)
        trip(worker_of(stack, "small-0").breaker)
        stack.small.heal()
        found = report(await asking)
        assert (found["tier"], found["path"], found["reason"]) == ("small", "prefill", "verified")
        assert len(stack.small.requests("cached_chat")) == 2


async def from_named_cache(stack: Stack, cache_id: str) -> dict[str, Any]:
    body = {"model": "large", "messages": MESSAGES, "kv_transfer_params": {"cache_id": cache_id}}
    return report(await stack.http.post("/v1/chat/completions", json=body))


async def test_a_cache_that_was_named_is_waited_for() -> None:
    async with in_process(breaker=BREAKER) as stack:
        cache_id = (await transfer(stack)).json()["cache_id"]
        trip(worker_of(stack, "large-0").breaker)
        assert (await from_named_cache(stack, cache_id))["path"] == "mapped"


async def test_nobody_waits_for_a_cache_where_another_worker_can_read_in_full() -> None:
    async with two_large(breaker=BREAKER | {"open_s": 4.0}) as (stack, other):
        cache_id = (await transfer(stack)).json()["cache_id"]
        trip(worker_of(stack, "large-0").breaker)
        started = time.monotonic()
        assert (await from_named_cache(stack, cache_id))["path"] == "fallback:large_circuit_open"
        assert time.monotonic() - started < 2.0 and len(other.requests("chat")) == 1
