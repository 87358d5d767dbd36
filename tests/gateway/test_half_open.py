"""Requests wait for the trial of an open circuit if no other worker can serve them."""

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

Send = Callable[[Stack], Coroutine[Any, Any, httpx.Response]]


async def complete(stack: Stack) -> httpx.Response:
    return await stack.http.post("/v1/completions", json={"model": "large", "prompt": "once upon"})


async def prefill(stack: Stack) -> httpx.Response:
    return await stack.http.post("/v1/prefix/prefill", json={"messages": MESSAGES[:1], "target_model": "small"})


async def transfer(stack: Stack) -> httpx.Response:
    cache_id = (await prefill(stack)).json()["cache_id"]
    return await stack.http.post("/v1/cache/transfer", json={"cache_id": cache_id, "target_model": "large"})


# caller -> (failing worker, failing call, request)
CALLERS: dict[str, tuple[str, str, Send]] = {
    "large by name": ("large", "chat", lambda stack: stack.chat(model="large")),
    "small by name": ("small", "chat", lambda stack: stack.chat(model="small")),
    "text": ("large", "complete", complete),
    "prefill": ("small", "prefill", prefill),
    "transfer": ("large", "transfer", transfer),
}


async def open_circuit(stack: Stack, caller: str) -> Send:
    """Open the circuit that this caller's requests use, and let further calls take as long as a trial."""
    name, call, send = CALLERS[caller]
    worker = getattr(stack, name)
    worker.fail(call, GONE)
    for _ in range(NUM_TO_OPEN):
        assert (await send(stack)).status_code == 502
    worker.delay(call, TRIAL_S)
    worker.calls.clear()
    return send


@pytest.mark.parametrize(
    ("caller", "pause_s"), [(name, 0.0) for name in CALLERS] + [("large by name", OPEN_S), ("transfer", OPEN_S)]
)
async def test_requests_wait_for_a_pending_or_running_trial(caller: str, pause_s: float) -> None:
    async with in_process(breaker=BREAKER) as stack:
        send = await open_circuit(stack, caller)
        await asyncio.sleep(pause_s)
        replies = await asyncio.gather(*(send(stack) for _ in range(4)))
        assert [reply.status_code for reply in replies] == [200] * 4


@pytest.mark.parametrize("caller", CALLERS)
async def test_a_failed_trial_ends_the_wait(caller: str) -> None:
    async with in_process(breaker=BREAKER | {"open_s": 0.4}) as stack:
        send = await open_circuit(stack, caller)
        name, call, _ = CALLERS[caller]
        getattr(stack, name).fail(call, GONE)
        replies = await asyncio.gather(*(send(stack) for _ in range(4)))
        assert sorted(reply.status_code for reply in replies) == [502, 503, 503, 503]
        assert {reply.headers.get("retry-after") for reply in replies if reply.status_code == 503} == {"1"}
        assert len(getattr(stack, name).requests(call)) == 1, "one trial: no call beside it, and no wait for a second"


@pytest.mark.parametrize("caller", CALLERS)
async def test_a_circuit_that_stays_open_beyond_the_deadline_fails_at_once(caller: str) -> None:
    async with in_process(breaker=BREAKER | {"open_s": 60.0}) as stack:
        send = await open_circuit(stack, caller)
        started = time.monotonic()
        assert (await send(stack)).status_code == 503
        assert time.monotonic() - started < 2.0
        name, call, _ = CALLERS[caller]
        assert getattr(stack, name).requests(call) == []


async def test_waiting_requests_count_towards_the_tiers_queue() -> None:
    async with in_process(breaker=BREAKER | {"open_s": 0.6}, limits={"max_queue_per_tier": 2}) as stack:
        send = await open_circuit(stack, "large by name")
        requests = [asyncio.create_task(send(stack)) for _ in range(5)]
        await eventually(lambda: stack.metric("num_requests_waiting", tier="large") == 2)
        assert stack.metric("num_requests_running", tier="large") == 0, "a waiting request holds no running slot"
        replies = await asyncio.gather(*requests)
        assert sorted(reply.status_code for reply in replies) == [200, 200, 503, 503, 503]


async def test_a_tier_is_ready_during_its_trial() -> None:
    """Load balancers may keep sending: requests wait for the trial and are served."""
    async with in_process(breaker=BREAKER | {"open_s": 60.0}) as stack:
        await open_circuit(stack, "large by name")
        assert await ready_tiers(stack) == {"small": True, "large": False}
    async with in_process(breaker=BREAKER) as stack:
        send = await open_circuit(stack, "large by name")
        trial = asyncio.create_task(send(stack))
        await eventually(lambda: len(stack.large.requests("chat")) == 1)
        assert await ready_tiers(stack) == {"small": True, "large": True}
        assert (await trial).status_code == 200


async def ready_tiers(stack: Stack) -> object:
    return (await stack.http.get("/readyz")).json()["tiers"]


async def test_a_request_waits_no_longer_than_its_deadline() -> None:
    async with in_process(breaker=BREAKER, deadlines={"request_s": 0.6}) as stack:
        send = await open_circuit(stack, "large by name")
        stack.large.delay("chat", 30.0)
        started = time.monotonic()
        replies = await asyncio.gather(*(send(stack) for _ in range(3)))
        assert sorted(reply.status_code for reply in replies) == [503, 503, 504]
        assert time.monotonic() - started < 3.0


async def test_no_request_waits_if_another_model_can_answer() -> None:
    async with in_process(breaker=BREAKER | {"open_s": 5.0}) as stack:
        stack.small.fail("prefill", GONE)
        for _ in range(NUM_TO_OPEN):
            await stack.chat()
        reply = await stack.chat()
        assert (report(reply)["path"], report(reply)["tier"]) == ("fallback:small_no_usable_worker", "large")
        assert stack.metric("circuit_transitions_total", target="small-0", to="half_open") == 0


async def test_requests_wait_for_the_small_model_if_it_is_the_only_one() -> None:
    async with in_process(breaker=BREAKER) as stack:
        await take_down(stack)
        stack.small.fail("prefill", GONE)
        for _ in range(NUM_TO_OPEN):
            assert (await stack.chat()).status_code == 503
        stack.small.delay("prefill", TRIAL_S)
        replies = await asyncio.gather(*(stack.chat() for _ in range(4)))
        assert [report(reply)["tier"] for reply in replies] == ["small"] * 4


async def test_requests_wait_for_a_worker_with_an_exact_cache() -> None:
    """The cache saves a full prefill behind the same circuit."""
    async with in_process(breaker=BREAKER) as stack:
        await stack.chat(model="large")
        stack.large.fail("cached_chat", GONE)
        stack.large.fail("chat", GONE)
        assert (await stack.chat(model="large")).status_code == 502
        stack.large.heal()
        replies = await asyncio.gather(*(stack.chat(model="large") for _ in range(4)))
        assert [report(reply)["path"] for reply in replies] == ["exact"] * 4


async def test_a_wait_leaves_time_for_the_call() -> None:
    """Otherwise the timeout of the call would open the circuit again."""
    async with in_process(breaker=BREAKER | {"open_s": 0.7}, deadlines={"request_s": 1.0}) as stack:
        send = await open_circuit(stack, "large by name")
        stack.large.delay("chat", 0.6)
        assert (await send(stack)).status_code == 503
        assert stack.large.requests("chat") == [], "only 0.3 s were left"


async def test_no_cache_is_transferred_to_a_worker_with_an_open_answer_circuit() -> None:
    async with in_process(breaker=BREAKER) as stack:
        cache_id = (await prefill(stack)).json()["cache_id"]
        await open_circuit(stack, "large by name")
        body = {"cache_id": cache_id, "target_model": "large"}
        assert (await stack.http.post("/v1/cache/transfer", json=body)).status_code == 503
        assert stack.large.requests("transfer") == []


async def test_a_transfer_waits_for_the_trial_of_the_answer_circuit() -> None:
    async with in_process(breaker=BREAKER) as stack:
        cache_id = (await prefill(stack)).json()["cache_id"]
        await open_circuit(stack, "large by name")
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


async def drain(stack: Stack) -> None:
    worker_of(stack, "large-0").is_drained = True


async def take_down(stack: Stack) -> None:
    stack.large.fail("readyz", GONE)
    await stack.check_health()
    await stack.check_health()


CALLS = {"answer": "chat", "own cache": "cached_chat", "transfer": "transfer"}


def circuit_of(worker: Worker, waits_for: str) -> Breaker:
    return worker.transfers if waits_for == "transfer" else worker.breaker


async def send_to_large(stack: Stack, waits_for: str) -> httpx.Response:
    return await (transfer(stack) if waits_for == "transfer" else stack.chat(model="large"))


async def start_waiting(stack: Stack, waits_for: str) -> asyncio.Task[httpx.Response]:
    waiting = asyncio.create_task(send_to_large(stack, waits_for))
    await eventually(lambda: stack.metric("num_requests_waiting", tier="large") == 1)
    return waiting


@pytest.mark.parametrize("leave", [drain, take_down])
@pytest.mark.parametrize("waits_for", CALLS)
async def test_a_wait_fails_at_once_if_the_worker_leaves(
    waits_for: str, leave: Callable[[Stack], Coroutine[Any, Any, None]]
) -> None:
    async with in_process(breaker=BREAKER | {"open_s": 4.0}) as stack:
        if waits_for == "own cache":
            await stack.chat(model="large")
        trip(circuit_of(worker_of(stack, "large-0"), waits_for))
        waiting = await start_waiting(stack, waits_for)
        await leave(stack)
        assert (await asyncio.wait_for(waiting, 1.0)).status_code == 503


@asynccontextmanager
async def two_large_workers(**changes: Any) -> AsyncIterator[tuple[Stack, FakeWorker]]:
    workers = values()["workers"] | {"large-1": {"tier": "large", "url": "http://large-1"}}
    other = FakeWorker("large-1", "fake-large")
    async with in_process({"large-1": httpx.ASGITransport(other)}, workers=workers, **changes) as stack:
        other.peers = stack.large.peers
        yield stack, other


@pytest.mark.parametrize("waits_for", ["answer", "transfer"])
async def test_the_first_worker_that_admits_a_trial_is_used(waits_for: str) -> None:
    async with two_large_workers(breaker=BREAKER | {"open_s": 0.8}) as (stack, other):
        for name in ("large-1", "large-0"):
            await asyncio.sleep(0.3)
            trip(circuit_of(worker_of(stack, name), waits_for))
        assert (await send_to_large(stack, waits_for)).status_code == 200
        assert other.requests(CALLS[waits_for]) and not stack.large.requests(CALLS[waits_for])


@pytest.mark.parametrize("waits_for", ["answer", "transfer"])
async def test_a_returning_worker_serves_waiting_requests(waits_for: str) -> None:
    async with two_large_workers(breaker=BREAKER | {"open_s": 4.0}) as (stack, other):
        second = worker_of(stack, "large-1")
        second.is_drained = True
        trip(circuit_of(worker_of(stack, "large-0"), waits_for))
        waiting = await start_waiting(stack, waits_for)
        second.is_drained = False
        assert (await asyncio.wait_for(waiting, 1.0)).status_code == 200
        assert other.requests(CALLS[waits_for])


async def test_a_handoff_avoids_workers_with_an_open_transfer_circuit() -> None:
    async with two_large_workers(breaker=BREAKER | {"open_s": 60.0}) as (stack, other):
        trip(worker_of(stack, "large-0").transfers)
        assert report(await stack.escalate())["path"] == "mapped"
        assert other.requests("transfer")
        trip(worker_of(stack, "large-1").transfers)
        another = [{"role": "system", "content": f"Another document. {LONG}"}, MESSAGES[-1]]
        assert report(await stack.escalate(another))["path"] == "fallback:circuit_open"


@pytest.mark.parametrize(("method", "waits_for"), [("open_answer", "answer"), ("transfer", "transfer")])
async def test_a_call_that_loses_the_probe_picks_a_worker_again(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, method: str, waits_for: str
) -> None:
    worker, num_calls = worker_of(stack, "large-0"), 0
    real = getattr(worker, method)

    async def lose_once(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 1:
            raise CircuitOpen("another call took the probe")
        return await real(*args, **kwargs)

    monkeypatch.setattr(worker, method, lose_once)
    assert (await send_to_large(stack, waits_for)).status_code == 200
    assert num_calls == 2


async def test_handoff_duration_excludes_the_wait() -> None:
    async with in_process(breaker=BREAKER | {"open_s": 0.6}) as stack:
        trip(worker_of(stack, "large-0").transfers)
        assert (await transfer(stack)).status_code == 200
        assert stack.metric("handoff_duration_seconds_count") == 1
        assert stack.metric("handoff_duration_seconds_sum") < 0.5


async def test_a_verifier_question_waits_for_a_trial() -> None:
    async with in_process(breaker=BREAKER, policy={"name": "verifier", "question": "Right?"}) as stack:
        stack.small.canned_answers = {"Right?": "Yes"}
        await take_down(stack)
        stack.small.stall("cached_chat", after=1)
        request = asyncio.create_task(stack.chat())
        await eventually(lambda: len(stack.small.requests("cached_chat")) == 1)
        trip(worker_of(stack, "small-0").breaker)
        stack.small.heal()
        kvrelay = report(await request)
        assert (kvrelay["tier"], kvrelay["path"], kvrelay["reason"]) == ("small", "prefill", "verified")
        assert len(stack.small.requests("cached_chat")) == 2


async def chat_from_cache(stack: Stack, cache_id: str) -> dict[str, Any]:
    body = {"model": "large", "messages": MESSAGES, "kv_transfer_params": {"cache_id": cache_id}}
    return report(await stack.http.post("/v1/chat/completions", json=body))


async def test_a_request_waits_for_the_cache_that_it_names() -> None:
    async with in_process(breaker=BREAKER) as stack:
        cache_id = (await transfer(stack)).json()["cache_id"]
        trip(worker_of(stack, "large-0").breaker)
        assert (await chat_from_cache(stack, cache_id))["path"] == "mapped"


async def test_no_request_waits_for_a_cache_if_another_worker_can_prefill() -> None:
    async with two_large_workers(breaker=BREAKER | {"open_s": 4.0}) as (stack, other):
        cache_id = (await transfer(stack)).json()["cache_id"]
        trip(worker_of(stack, "large-0").breaker)
        started = time.monotonic()
        assert (await chat_from_cache(stack, cache_id))["path"] == "fallback:large_circuit_open"
        assert time.monotonic() - started < 2.0 and len(other.requests("chat")) == 1
