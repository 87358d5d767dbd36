"""Whatever fails or is late on the fast path, the client gets the right answer within its deadline, and is told."""

from __future__ import annotations

import time
from collections.abc import Callable

import httpx
import pytest

from tests.gateway.stack import (
    MESSAGES,
    Stack,
    fakes,
    follow_up,
    in_process,
    report,
    right_answer,
    text,
    values,
)
from tools.fake_worker import FakeWorker
from workers.api.errors import (
    BundleUnusable,
    CacheMismatch,
    CacheNotFound,
    CacheStale,
    ContextLengthExceeded,
    DeadlineExceeded,
    InvalidRequest,
    KvrelayError,
    Overloaded,
    TransferFailed,
    WorkerUnavailable,
)
from workers.api.schemas import Rates

DEADLINES = {"request_s": 4.0, "decode_reserve_s": 0.5, "small_share": 0.25, "assumed_prefill_tokens_per_s": 500.0}

# phase -> (the worker that fails, the call that fails, how the reason begins)
PHASES = {
    "prefill": ("small", "prefill", "small_"),
    "small_answer": ("small", "cached_chat", "small_"),
    "transfer": ("large", "transfer", ""),
    "large_answer": ("large", "cached_chat", "large_"),
}
FAULTS: dict[str, Callable[[FakeWorker, str], None]] = {
    "down": lambda worker, call: worker.fail(call, WorkerUnavailable("gone")),
    "bug": lambda worker, call: worker.fail(call, KvrelayError("a bug")),
    "full": lambda worker, call: worker.fail(call, Overloaded("full", retry_after_s=3)),
    "lost": lambda worker, call: worker.fail(call, CacheNotFound("evicted")),
    "stale": lambda worker, call: worker.fail(call, CacheStale("written since")),
    "foreign": lambda worker, call: worker.fail(call, CacheMismatch("another tenant's")),
    "late": lambda worker, call: worker.fail(call, DeadlineExceeded("too late")),
    "garbage": lambda worker, call: worker.garble(call),
    "hangs": lambda worker, call: worker.delay(call, 60.0),
}


def make_unsure(stack: Stack) -> None:
    stack.small.logprob = -2.0


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("phase", PHASES)
async def test_every_fault_in_every_phase_ends_in_the_right_answer(phase: str, fault: str) -> None:
    async with in_process(deadlines=DEADLINES) as stack:
        make_unsure(stack)
        worker, call, prefix = PHASES[phase]
        FAULTS[fault](getattr(stack, worker), call)
        started = time.monotonic()
        reply = await stack.chat()
        assert time.monotonic() - started < DEADLINES["request_s"]
        assert text(reply) == right_answer(stack.large, MESSAGES)
        path = report(reply)["path"]
        assert path.startswith(f"fallback:{prefix}"), path
        assert reply.headers["x-kvrelay-path"] == path
        assert report(reply)["tier"] == "large"
        assert stack.metric("full_prefill_fallback_total", reason=path.removeprefix("fallback:")) == 1
        assert stack.large.requests("chat"), "the answer was read natively"
        assert report(reply)["mapper"] is report(reply)["handoff_tokens"] is report(reply)["transfer_ms"] is None


async def test_a_forced_escalation_falls_back_too(stack: Stack) -> None:
    stack.large.fail("transfer", TransferFailed("the source is gone"))
    reply = await stack.escalate()
    assert (report(reply)["path"], text(reply)) == ("fallback:transfer_failed", right_answer(stack.large, MESSAGES))
    assert stack.metric("handoffs_total", result="transfer_failed") == 1


async def test_no_bundle_is_told_by_its_name(stack: Stack) -> None:
    stack.large.fail("transfer", BundleUnusable("no mapper for this pair"))
    assert report(await stack.escalate())["path"] == "fallback:no_bundle"


async def test_what_the_transfer_calls_a_mistake_is_no_mistake_of_the_client(stack: Stack) -> None:
    stack.large.fail("transfer", InvalidRequest("num_tokens is more than the source has"))
    reply = await stack.escalate()
    assert (report(reply)["path"], text(reply)) == ("fallback:invalid_request", right_answer(stack.large, MESSAGES))


async def test_a_prompt_too_long_for_the_small_model_goes_to_the_large_one(stack: Stack) -> None:
    stack.small.max_model_len = 100
    reply = await stack.chat()
    assert report(reply)["path"] == "fallback:small_context_length_exceeded"
    assert text(reply) == right_answer(stack.large, MESSAGES)


async def test_a_prompt_too_long_for_both_is_the_clients_mistake(stack: Stack) -> None:
    stack.small.max_model_len = stack.large.max_model_len = 100
    reply = await stack.chat()
    assert reply.status_code == 400
    assert reply.json()["error"]["code"] == ContextLengthExceeded.code


async def test_the_clients_mistake_is_told_at_once(stack: Stack) -> None:
    stack.small.fail("prefill", InvalidRequest("no template for tools", param="tools"))
    reply = await stack.chat()
    assert reply.status_code == 400
    assert stack.large.requests("chat") == []


async def test_a_handoff_is_not_tried_without_time_for_a_full_prefill() -> None:
    async with in_process(deadlines={"request_s": 4.0, "decode_reserve_s": 0.5}) as stack:
        stack.large.rates = Rates(prefill_tokens_per_s=100.0, map_tokens_per_s=10_000.0)  # 6 s for this prompt
        await stack.check_health()
        reply = await stack.escalate()
        assert (report(reply)["path"], text(reply)) == ("fallback:no_time", right_answer(stack.large, MESSAGES))
        assert stack.large.requests("transfer") == []


async def test_a_handoff_gets_no_longer_than_a_prefill_would_take() -> None:
    async with in_process() as stack:
        stack.large.rates = Rates(prefill_tokens_per_s=5000.0)  # about 110 ms for what is handed over
        await stack.check_health()
        stack.large.delay("transfer", 5.0)
        started = time.monotonic()
        reply = await stack.escalate()
        assert report(reply)["path"] == "fallback:deadline_exceeded"
        assert stack.large.requests("transfer")[0]["deadline_ms"] <= 120.0
        assert time.monotonic() - started < 2.0


async def test_a_target_of_unknown_pace_is_thought_no_faster_than_the_small_model() -> None:
    """On a slow machine the assumed rate would leave the first handoff too little time."""
    async with in_process(deadlines={"request_s": 60.0}) as stack:
        stack.small.rates = Rates(prefill_tokens_per_s=50.0)
        await stack.check_health()
        kvrelay = report(await stack.escalate())
        assert kvrelay["path"] == "mapped"
        handed_over = kvrelay["handoff_tokens"]
        assert stack.large.requests("transfer")[0]["deadline_ms"] == pytest.approx(1000 * handed_over / 50, rel=0.05)


async def test_the_source_frozen_between_prefill_and_transfer(stack: Stack) -> None:
    """The large worker waits for the frozen one; the deadline it was given ends that."""
    stack.large.rates = Rates(prefill_tokens_per_s=2000.0)
    await stack.check_health()
    await stack.chat()  # the small model has read the prompt, and the registry knows
    stack.small.is_frozen = True
    reply = await stack.escalate()
    assert (report(reply)["path"], text(reply)) == ("fallback:deadline_exceeded", right_answer(stack.large, MESSAGES))


async def test_a_frozen_small_worker_leaves_time_for_the_large_one() -> None:
    async with in_process(deadlines=DEADLINES) as stack:
        stack.small.is_frozen = True
        started = time.monotonic()
        reply = await stack.chat()
        assert time.monotonic() - started < DEADLINES["request_s"]
        assert report(reply)["path"] == "fallback:small_deadline_exceeded"
        assert text(reply) == right_answer(stack.large, MESSAGES)


async def test_a_small_worker_known_to_be_down_is_not_waited_for(stack: Stack) -> None:
    stack.small.fail("info", WorkerUnavailable("gone"))
    await stack.check_health()
    await stack.check_health()
    assert report(await stack.chat())["path"] == "fallback:small_no_usable_worker"
    assert stack.small.requests("prefill") == []


async def test_without_a_large_model_the_small_one_answers(stack: Stack) -> None:
    make_unsure(stack)
    stack.large.fail("readyz", WorkerUnavailable("draining"))
    await stack.check_health()
    await stack.check_health()
    reply = await stack.chat()
    assert (report(reply)["path"], report(reply)["tier"]) == ("fallback:large_no_usable_worker", "small")
    assert text(reply) == right_answer(stack.small, MESSAGES)


@pytest.mark.parametrize("policy", [None, "always_escalate"])
async def test_without_a_large_model_the_small_one_may_take_its_time(stack: Stack, policy: str | None) -> None:
    """Longer than its share of the deadline: there is nobody whom that would leave time to."""
    stack.large.fail("readyz", WorkerUnavailable("draining"))
    await stack.check_health()
    await stack.check_health()
    stack.small.delay("prefill", 1.5 * DEADLINES["request_s"] * DEADLINES["small_share"])
    reply = await stack.chat(kvrelay={"policy": policy} if policy else {})
    assert report(reply)["tier"] == "small"
    assert text(reply) == right_answer(stack.small, MESSAGES)


async def test_a_large_model_that_fails_altogether_leaves_it_to_the_small_one(stack: Stack) -> None:
    make_unsure(stack)
    for call in ("transfer", "chat", "cached_chat"):
        stack.large.fail(call, WorkerUnavailable("gone"))
    reply = await stack.chat()
    assert (report(reply)["path"], report(reply)["tier"]) == ("fallback:large_worker_unavailable", "small")
    assert text(reply) == right_answer(stack.small, MESSAGES)


async def test_a_model_asked_for_by_name_is_not_replaced(stack: Stack) -> None:
    stack.large.fail("chat", WorkerUnavailable("connection to http://10.0.0.7:8001 refused"))
    reply = await stack.chat(model="large")
    assert reply.status_code == 502
    assert reply.json()["error"]["type"] == "upstream_error"
    assert "10.0.0.7" not in reply.text, "addresses are not the client's business"


async def test_a_second_worker_of_the_tier_takes_over() -> None:
    workers = {
        "small-0": {"tier": "small", "url": "http://small-0"},
        "large-0": {"tier": "large", "url": "http://large-0"},
        "large-1": {"tier": "large", "url": "http://127.0.0.1:9"},  # nobody listens
    }
    async with in_process(workers=workers) as stack:
        for _ in range(4):
            reply = await stack.chat(model="large")
            assert text(reply) == right_answer(stack.large, MESSAGES)


class Vanishing(httpx.ASGITransport):
    """Answers when looked at, and takes no connection for an answer."""

    num_dropped = 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/chat/completions":
            self.num_dropped += 1
            raise httpx.ConnectTimeout("the packets vanish")
        return await super().handle_async_request(request)


async def test_so_it_does_for_one_that_takes_no_connection() -> None:
    """Which is no deadline of the request's: there is time left to ask another."""
    workers = {"large-1": {"tier": "large", "url": "http://large-1"}} | values()["workers"]
    vanishing = Vanishing(FakeWorker("large-1", "fake-large"))
    async with in_process({"large-1": vanishing}, workers=workers) as stack:
        reply = await stack.chat(model="large")
        assert text(reply) == right_answer(stack.large, MESSAGES)
        assert vanishing.num_dropped == 1, "it was asked first"


async def test_a_late_answer_is_told_without_addresses(stack: Stack) -> None:
    stack.large.fail("chat", DeadlineExceeded("worker at http://10.0.0.7:8001 did not answer"))
    reply = await stack.chat(model="large")
    assert (reply.status_code, reply.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert "10.0.0.7" not in reply.text


async def test_a_cache_lost_in_a_restart_is_a_miss(stack: Stack) -> None:
    """Restarted unnoticed, the worker says itself that it does not know the cache."""
    await stack.chat()
    stack.small.restart()
    reply = await stack.chat()
    assert text(reply) == right_answer(stack.small, MESSAGES)
    assert report(reply)["tier"] == "small"
    assert stack.metric("prefix_lookup_stale_total", tier="small") == 1
    assert len(stack.small.requests("prefill")) == 2, "read anew"


async def test_an_entry_of_another_epoch_is_not_even_tried(stack: Stack) -> None:
    await stack.chat()
    stack.small.restart()
    await stack.check_health()
    await stack.chat()
    assert stack.metric("worker_restarts_total", target="small-0") == 1
    assert stack.metric("prefix_lookup_hits_total", tier="small") == 0
    asked = [body["kv_transfer_params"]["cache_id"] for body in stack.small.requests("cached_chat")]
    assert len(set(asked)) == 2, "the cache of the first epoch is forgotten"


async def test_the_large_models_cache_lost_in_a_restart_is_handed_over_anew(stack: Stack) -> None:
    first = await stack.escalate()
    stack.large.restart()
    second = follow_up(MESSAGES, first, "And then?")
    reply = await stack.escalate(second)
    assert (report(reply)["path"], text(reply)) == ("mapped", right_answer(stack.large, second))
    assert len(stack.large.requests("transfer")) == 2
    assert stack.metric("prefix_lookup_stale_total", tier="large") == 1


async def test_an_exact_cache_that_is_gone_falls_back(stack: Stack) -> None:
    await stack.chat(model="large")
    stack.large.restart()
    reply = await stack.chat(model="large")
    assert (report(reply)["path"], text(reply)) == (
        "fallback:large_cache_not_found",
        right_answer(stack.large, MESSAGES),
    )


async def test_an_answer_to_another_prompt_would_be_seen() -> None:
    """The fakes tell prompts apart, else the tests above would prove nothing."""
    _, large = fakes()
    other = [*MESSAGES[:1], {"role": "user", "content": "What comes after word42?"}]
    assert right_answer(large, MESSAGES) != right_answer(large, other)
