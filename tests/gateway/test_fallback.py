"""Faults and delays on the fast path: the right answer within the deadline, with the reason in the report."""

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

# phase -> (failing worker, failing call, prefix of the reason)
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
    "foreign": lambda worker, call: worker.fail(call, CacheMismatch("belongs to another tenant")),
    "late": lambda worker, call: worker.fail(call, DeadlineExceeded("late")),
    "garbage": lambda worker, call: worker.garble(call),
    "hangs": lambda worker, call: worker.delay(call, 60.0),
}


def make_unsure(stack: Stack) -> None:
    stack.small.logprob = -2.0


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("phase", PHASES)
async def test_a_fault_in_any_phase_falls_back_to_the_right_answer(phase: str, fault: str) -> None:
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
        assert stack.large.requests("chat"), "the large model prefilled the prompt itself"
        assert report(reply)["mapper"] is report(reply)["handoff_tokens"] is report(reply)["transfer_ms"] is None


async def test_a_forced_escalation_also_falls_back(stack: Stack) -> None:
    stack.large.fail("transfer", TransferFailed("source is gone"))
    reply = await stack.escalate()
    assert (report(reply)["path"], text(reply)) == ("fallback:transfer_failed", right_answer(stack.large, MESSAGES))
    assert stack.metric("handoffs_total", result="transfer_failed") == 1


async def test_a_missing_bundle_is_reported_as_no_bundle(stack: Stack) -> None:
    stack.large.fail("transfer", BundleUnusable("no mapper for this pair"))
    assert report(await stack.escalate())["path"] == "fallback:no_bundle"


async def test_an_invalid_transfer_falls_back_and_is_not_a_client_error(stack: Stack) -> None:
    stack.large.fail("transfer", InvalidRequest("num_tokens exceeds the source"))
    reply = await stack.escalate()
    assert (report(reply)["path"], text(reply)) == ("fallback:invalid_request", right_answer(stack.large, MESSAGES))


async def test_a_prompt_too_long_for_the_small_model_goes_to_the_large_one(stack: Stack) -> None:
    stack.small.max_model_len = 100
    reply = await stack.chat()
    assert report(reply)["path"] == "fallback:small_context_length_exceeded"
    assert text(reply) == right_answer(stack.large, MESSAGES)


async def test_a_prompt_too_long_for_both_models_is_refused(stack: Stack) -> None:
    stack.small.max_model_len = stack.large.max_model_len = 100
    reply = await stack.chat()
    assert reply.status_code == 400
    assert reply.json()["error"]["code"] == ContextLengthExceeded.code


async def test_an_invalid_request_is_refused_without_a_fallback(stack: Stack) -> None:
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


async def test_the_deadline_of_a_handoff_is_at_most_the_prefill_time() -> None:
    async with in_process() as stack:
        stack.large.rates = Rates(prefill_tokens_per_s=5000.0)  # about 110 ms for what is handed over
        await stack.check_health()
        stack.large.delay("transfer", 5.0)
        started = time.monotonic()
        reply = await stack.escalate()
        assert report(reply)["path"] == "fallback:deadline_exceeded"
        assert stack.large.requests("transfer")[0]["deadline_ms"] <= 120.0
        assert time.monotonic() - started < 2.0


async def test_an_unmeasured_target_is_assumed_no_faster_than_the_small_model() -> None:
    """On a slow machine the assumed rate would leave the first handoff too little time."""
    async with in_process(deadlines={"request_s": 60.0}) as stack:
        stack.small.rates = Rates(prefill_tokens_per_s=50.0)
        await stack.check_health()
        kvrelay = report(await stack.escalate())
        assert kvrelay["path"] == "mapped"
        handed_over = kvrelay["handoff_tokens"]
        assert stack.large.requests("transfer")[0]["deadline_ms"] == pytest.approx(1000 * handed_over / 50, rel=0.05)


async def test_a_source_frozen_between_prefill_and_transfer_falls_back(stack: Stack) -> None:
    """The large worker waits for the frozen source until the deadline of the transfer."""
    stack.large.rates = Rates(prefill_tokens_per_s=2000.0)
    await stack.check_health()
    await stack.chat()  # prefills and registers the prompt on the small worker
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


async def test_a_small_worker_that_is_down_is_skipped(stack: Stack) -> None:
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
async def test_without_a_large_model_the_small_one_has_the_whole_deadline(stack: Stack, policy: str | None) -> None:
    """Its share of the deadline does not apply: no other tier needs the rest."""
    stack.large.fail("readyz", WorkerUnavailable("draining"))
    await stack.check_health()
    await stack.check_health()
    stack.small.delay("prefill", 1.5 * DEADLINES["request_s"] * DEADLINES["small_share"])
    reply = await stack.chat(kvrelay={"policy": policy} if policy else {})
    assert report(reply)["tier"] == "small"
    assert text(reply) == right_answer(stack.small, MESSAGES)


async def test_the_small_model_answers_if_every_large_call_fails(stack: Stack) -> None:
    make_unsure(stack)
    for call in ("transfer", "chat", "cached_chat"):
        stack.large.fail(call, WorkerUnavailable("gone"))
    reply = await stack.chat()
    assert (report(reply)["path"], report(reply)["tier"]) == ("fallback:large_worker_unavailable", "small")
    assert text(reply) == right_answer(stack.small, MESSAGES)


async def test_a_named_model_is_not_replaced(stack: Stack) -> None:
    stack.large.fail("chat", WorkerUnavailable("connection to http://10.0.0.7:8001 refused"))
    reply = await stack.chat(model="large")
    assert reply.status_code == 502
    assert reply.json()["error"]["type"] == "upstream_error"
    assert "10.0.0.7" not in reply.text, "clients do not see addresses"


async def test_a_second_worker_of_the_tier_takes_over() -> None:
    workers = {
        "small-0": {"tier": "small", "url": "http://small-0"},
        "large-0": {"tier": "large", "url": "http://large-0"},
        "large-1": {"tier": "large", "url": "http://127.0.0.1:9"},  # nothing listens there
    }
    async with in_process(workers=workers) as stack:
        for _ in range(4):
            reply = await stack.chat(model="large")
            assert text(reply) == right_answer(stack.large, MESSAGES)


class DroppingTransport(httpx.ASGITransport):
    """Answers health checks; connections for chat time out."""

    num_dropped = 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/chat/completions":
            self.num_dropped += 1
            raise httpx.ConnectTimeout("packets dropped")
        return await super().handle_async_request(request)


async def test_a_second_worker_takes_over_after_a_connect_timeout() -> None:
    """A connect timeout leaves time in the request's deadline for another worker."""
    workers = {"large-1": {"tier": "large", "url": "http://large-1"}} | values()["workers"]
    dropping = DroppingTransport(FakeWorker("large-1", "fake-large"))
    async with in_process({"large-1": dropping}, workers=workers) as stack:
        reply = await stack.chat(model="large")
        assert text(reply) == right_answer(stack.large, MESSAGES)
        assert dropping.num_dropped == 1, "it was tried first"


async def test_a_timeout_is_reported_without_addresses(stack: Stack) -> None:
    stack.large.fail("chat", DeadlineExceeded("worker at http://10.0.0.7:8001 did not answer"))
    reply = await stack.chat(model="large")
    assert (reply.status_code, reply.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert "10.0.0.7" not in reply.text


async def test_a_cache_lost_in_a_restart_is_a_miss(stack: Stack) -> None:
    """Before the gateway notices the restart, the worker itself reports the cache as unknown."""
    await stack.chat()
    stack.small.restart()
    reply = await stack.chat()
    assert text(reply) == right_answer(stack.small, MESSAGES)
    assert report(reply)["tier"] == "small"
    assert stack.metric("prefix_lookup_stale_total", tier="small") == 1
    assert len(stack.small.requests("prefill")) == 2, "prefilled again"


async def test_an_entry_of_an_earlier_epoch_is_not_tried(stack: Stack) -> None:
    await stack.chat()
    stack.small.restart()
    await stack.check_health()
    await stack.chat()
    assert stack.metric("worker_restarts_total", target="small-0") == 1
    assert stack.metric("prefix_lookup_hits_total", tier="small") == 0
    cache_ids = [body["kv_transfer_params"]["cache_id"] for body in stack.small.requests("cached_chat")]
    assert len(set(cache_ids)) == 2, "the first epoch's cache is not used again"


async def test_a_large_cache_lost_in_a_restart_is_handed_over_again(stack: Stack) -> None:
    first = await stack.escalate()
    stack.large.restart()
    second = follow_up(MESSAGES, first, "And then?")
    reply = await stack.escalate(second)
    assert (report(reply)["path"], text(reply)) == ("mapped", right_answer(stack.large, second))
    assert len(stack.large.requests("transfer")) == 2
    assert stack.metric("prefix_lookup_stale_total", tier="large") == 1


async def test_a_lost_exact_cache_falls_back(stack: Stack) -> None:
    await stack.chat(model="large")
    stack.large.restart()
    reply = await stack.chat(model="large")
    assert (report(reply)["path"], text(reply)) == (
        "fallback:large_cache_not_found",
        right_answer(stack.large, MESSAGES),
    )


async def test_fake_answers_differ_between_prompts() -> None:
    """The tests above rely on this property of the fakes."""
    _, large = fakes()
    other = [*MESSAGES[:1], {"role": "user", "content": "What comes after word42?"}]
    assert right_answer(large, MESSAGES) != right_answer(large, other)
