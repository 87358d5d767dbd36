"""Three tiers: escalation step by step or past a tier, and conversations that move between tiers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from gateway.settings import from_values
from gateway.upstream.worker import MISSES_UNTIL_DOWN
from tests.gateway.stack import LONG, MESSAGES, Stack, follow_up, in_process, report, right_answer, text, values
from tools.fake_worker import FakeWorker
from workers.api.config import SettingsError
from workers.api.errors import TransferFailed, WorkerUnavailable
from workers.api.schemas import Rates

POLICY = {"name": "confidence", "threshold": -0.5, "num_tokens": 3}
TIERS = [
    {"name": "small", "model": "fake-small"},
    {"name": "mid", "model": "fake-mid"},
    {"name": "large", "model": "fake-large"},
]
UNSURE, SURE, LOST = -0.9, -0.1, -4.0


@asynccontextmanager
async def three_tiers(
    deadlines: dict[str, float] | None = None, **policy: Any
) -> AsyncIterator[tuple[Stack, FakeWorker]]:
    """Yield the stack and the middle worker."""
    mid = FakeWorker("mid-0", "fake-mid")
    workers = values()["workers"] | {"mid-0": {"tier": "mid", "url": "http://mid-0"}}
    transport = httpx.ASGITransport(mid)
    changes = {"deadlines": deadlines} if deadlines else {}
    async with in_process(
        {"mid-0": transport}, tiers=TIERS, workers=workers, policy=POLICY | policy, **changes
    ) as stack:
        mid.peers = {"small-0": stack.small}
        yield stack, mid


@pytest.mark.parametrize(
    ("small", "mid", "policy", "tier", "reason"),
    [
        (SURE, SURE, {}, "small", "confident"),
        (UNSURE, SURE, {}, "mid", "confident"),
        (UNSURE, UNSURE, {}, "large", "unsure"),
        (UNSURE, SURE, {"skip": ["mid"]}, "large", "unsure"),
        (LOST, SURE, {"leap_below": -2.0}, "large", "lost"),
        (UNSURE, SURE, {"leap_below": -2.0}, "mid", "confident"),
    ],
)
async def test_escalation_stops_at_the_first_confident_tier(
    small: float, mid: float, policy: dict[str, Any], tier: str, reason: str
) -> None:
    async with three_tiers(**policy) as (stack, middle):
        stack.small.logprob, middle.logprob = small, mid
        reply = await stack.chat()
        answering = {"small": stack.small, "mid": middle, "large": stack.large}[tier]
        assert (text(reply), report(reply)["tier"]) == (right_answer(answering, MESSAGES), tier)
        assert (report(reply)["reason"], report(reply)["path"]) == (reason, "prefill" if tier == "small" else "mapped")
        called = [worker.name for worker in (stack.small, middle, stack.large) if worker.requests("cached_chat")]
        between = ["mid-0"] if tier == "mid" or (mid == UNSURE) else []
        assert called == ["small-0", *between, *(["large-0"] if tier == "large" else [])]
        for call in (*middle.requests("transfer"), *stack.large.requests("transfer")):
            assert call["source_worker"] == "small-0", "a mapped cache is never a source"


async def test_a_forced_escalation_skips_the_middle_tier() -> None:
    async with three_tiers() as (stack, mid):
        assert report(await stack.escalate())["tier"] == "large"
        assert not mid.requests("transfer") and not mid.requests("chat")


@pytest.mark.parametrize("call", ["transfer", "cached_chat"])
async def test_a_middle_tier_that_falls_back_to_a_full_prefill_is_judged(call: str) -> None:
    async with three_tiers() as (stack, mid):
        stack.small.logprob = UNSURE
        mid.fail(call, TransferFailed("gone"))
        reply = await stack.chat()
        assert (text(reply), report(reply)["tier"]) == (right_answer(mid, MESSAGES), "mid")
        assert report(reply)["path"].startswith("fallback:")
        mid.logprob = UNSURE
        reply = await stack.chat([*MESSAGES[:1], {"role": "user", "content": "Another question?"}])
        assert (report(reply)["tier"], report(reply)["reason"]) == ("large", "unsure")


async def test_a_middle_tier_that_cannot_answer_is_skipped() -> None:
    async with three_tiers() as (stack, mid):
        stack.small.logprob = UNSURE
        for call in ("transfer", "chat", "cached_chat"):
            mid.fail(call, WorkerUnavailable("gone"), times=9)
        reply = await stack.chat()
        assert (text(reply), report(reply)["tier"]) == (right_answer(stack.large, MESSAGES), "large")


SHORT_OF_TIME = {"request_s": 1.6, "decode_reserve_s": 0.1, "transfer_floor_s": 1.0}


@pytest.mark.parametrize(("call", "exact"), [("chat", True), ("cached_chat", False)])
async def test_a_stalled_middle_tier_leaves_time_for_the_tier_above(call: str, exact: bool) -> None:
    async with three_tiers(deadlines=SHORT_OF_TIME) as (stack, mid):
        stack.small.logprob = UNSURE
        mid.rates = Rates(prefill_tokens_per_s=100_000.0)
        await stack.check_health()
        mid.fail("chat", WorkerUnavailable("gone"))
        mid.delay(call, 60.0)
        for late in ("chat", "cached_chat"):
            stack.large.delay(late, 0.4)
        assert report(await stack.chat(kvrelay={"exact": exact}))["tier"] == "large"
        assert bool(mid.requests("transfer")) is not exact


async def test_a_middle_tier_has_the_whole_deadline_if_the_tier_above_is_down() -> None:
    async with three_tiers(deadlines=SHORT_OF_TIME) as (stack, mid):
        stack.small.logprob = UNSURE
        mid.delay("chat", 1.0)
        stack.large.fail("info", WorkerUnavailable("gone"))
        for _ in range(MISSES_UNTIL_DOWN):
            await stack.check_health()
        assert report(await stack.chat(kvrelay={"exact": True}))["tier"] == "mid"


@pytest.mark.parametrize("skip", ["small", "large", "huge"])
def test_only_a_middle_tier_can_be_skipped(skip: str) -> None:
    workers = values()["workers"] | {"mid-0": {"tier": "mid", "url": "http://mid-0"}}
    with pytest.raises(SettingsError, match=f"policy.skip: '{skip}' is not a tier between .* known: mid"):
        from_values(values(tiers=TIERS, workers=workers, policy=POLICY | {"skip": [skip]}))


async def test_after_six_turns_on_small_the_whole_history_is_handed_over(stack: Stack) -> None:
    messages: list[dict[str, Any]] = MESSAGES
    for number in range(6):
        reply = await stack.chat(messages)
        assert report(reply)["tier"] == "small"
        messages = follow_up(messages, reply, f"And then, for the {number}th time?")
    moved = await stack.escalate(messages)
    assert text(moved) == right_answer(stack.large, messages)
    (transfer,) = stack.large.requests("transfer")
    (answered,) = stack.large.requests("cached_chat")
    num_prompt = moved.json()["usage"]["prompt_tokens"]
    assert (report(moved)["path"], transfer["num_tokens"]) == ("mapped", num_prompt - 64)
    assert len(answered["messages"]) == len(messages) == 14
    assert stack.small.requests("prefill")[-1]["messages"][-1]["content"] == messages[-1]["content"]


@asynccontextmanager
async def with_downward_bundle(**changes: Any) -> AsyncIterator[Stack]:
    """A stack whose small worker can map the large worker's caches."""
    async with in_process(**changes) as stack:
        stack.small.peers = {"large-0": stack.large}
        await stack.check_health()
        yield stack


async def two_turns_with_large(stack: Stack) -> list[dict[str, Any]]:
    """Return a conversation after two turns that only the large model has prefilled."""
    first = await stack.chat(model="large")
    second = await stack.chat(messages := follow_up(MESSAGES, first, f"Is that so? {LONG}"), model="large")
    return follow_up(messages, second, "And then?")


async def test_a_conversation_that_moves_down_is_mapped_to_the_small_model() -> None:
    async with with_downward_bundle() as stack:
        reply = await stack.chat(messages := await two_turns_with_large(stack))
        assert (text(reply), report(reply)["path"]) == (right_answer(stack.small, messages), "mapped")
        (transfer,) = stack.small.requests("transfer")
        assert transfer["source_worker"] == "large-0" and not stack.small.requests("prefill")
        assert report(reply)["handoff_tokens"] == transfer["num_tokens"] > 1000


async def test_a_conversation_that_escalates_again_reuses_the_large_cache() -> None:
    async with with_downward_bundle() as stack:
        messages = await two_turns_with_large(stack)
        stack.small.logprob = UNSURE
        reply = await stack.chat(messages)
        assert (text(reply), report(reply)["path"]) == (right_answer(stack.large, messages), "exact")
        assert not stack.large.requests("transfer") and not stack.small.requests("prefill")


@pytest.mark.parametrize("on_trial", [True, False])
async def test_a_bundle_on_trial_gets_transfers(on_trial: bool) -> None:
    async with with_downward_bundle() as stack:
        stack.small.bundle_off, stack.small.bundle_on_trial = "below the gate", on_trial
        await stack.check_health()
        reply = await stack.chat(messages := await two_turns_with_large(stack))
        assert (text(reply), report(reply)["path"]) == (right_answer(stack.small, messages), "prefill")
        assert len(stack.small.requests("transfer")) == on_trial


@pytest.mark.parametrize("why", ["no_bundle", "exact", "fails", "short"])
async def test_the_small_model_prefills_if_it_cannot_map_down(why: str) -> None:
    async with with_downward_bundle(**({"handoff": {"min_tokens": 5000}} if why == "short" else {})) as stack:
        if why == "no_bundle":
            stack.small.peers = {}
            await stack.check_health()
        if why == "fails":
            stack.small.fail("transfer", TransferFailed("gone"))
        messages = await two_turns_with_large(stack)
        reply = await stack.chat(messages, kvrelay={"exact": True} if why == "exact" else None)
        assert (text(reply), report(reply)["path"]) == (right_answer(stack.small, messages), "prefill")
        assert len(stack.small.requests("prefill")) == 1
        assert bool(stack.small.requests("transfer")) is (why == "fails")
