"""The cascade as a client sees it: the answering tier, the path, and the requests that workers receive."""

from __future__ import annotations

import pytest

from tests.gateway.stack import (
    LONG,
    MESSAGES,
    SYSTEM,
    USER,
    Stack,
    follow_up,
    in_process,
    report,
    right_answer,
    text,
)
from tools.fake_worker import render
from workers.api.errors import BundleUnusable, HandoffDeclined, KvrelayError, NoTime, PrefillCheaper
from workers.api.schemas import ESCALATION_PRIORITY, Message, Rates

NUM_TOKENS = len(render([Message.model_validate(message) for message in MESSAGES]))


async def test_a_confident_small_answer_is_delivered(stack: Stack) -> None:
    reply = await stack.chat()
    assert text(reply) == right_answer(stack.small, MESSAGES)
    assert (report(reply)["tier"], report(reply)["forced"], report(reply)["confidence"]) == ("small", False, -0.125)
    assert stack.large.requests("chat") == stack.large.requests("cached_chat") == stack.large.requests("transfer") == []


async def test_an_unsure_answer_is_escalated_by_handoff(stack: Stack) -> None:
    stack.small.logprob = -2.0
    reply = await stack.chat()
    assert text(reply) == right_answer(stack.large, MESSAGES)
    kvrelay = report(reply)
    assert (kvrelay["tier"], kvrelay["path"], kvrelay["forced"]) == ("large", "mapped", False)
    assert kvrelay["confidence"] == pytest.approx(-2.0)
    assert kvrelay["mapper"] == "fake-bundle"
    assert reply.headers["x-kvrelay-path"] == "mapped"
    assert reply.headers["x-kvrelay-model"] == reply.json()["model"] == "fake-large"
    assert float(reply.headers["x-kvrelay-overhead-ms"]) >= 0


@pytest.mark.parametrize(
    ("cost_decision", "path"),
    [(None, "mapped"), (300, "hybrid"), (PrefillCheaper("prefill is cheaper"), "prefill")],
)
@pytest.mark.parametrize("reports_early", [True, False])
async def test_the_target_decides_by_cost_how_much_to_map(
    stack: Stack, cost_decision: int | KvrelayError | None, path: str, reports_early: bool
) -> None:
    stack.small.logprob, stack.large.by_cost, stack.large.reports_early = -2.0, cost_decision, reports_early
    reply = await stack.chat()
    assert (report(reply)["tier"], report(reply)["path"], report(reply)["forced"]) == ("large", path, False)
    assert text(reply) == right_answer(stack.large, MESSAGES)
    mapped = {"mapped": NUM_TOKENS - 64 - 4, "hybrid": 300 - 4, "prefill": 0}
    assert report(reply)["mapped_tokens"] == mapped[path]
    assert (stack.metric("circuit_state", target="large-0/transfer"), num_fallbacks(stack)) == (0, 0)


@pytest.mark.parametrize("error", [PrefillCheaper("prefill is cheaper"), NoTime("would miss the deadline")])
async def test_declined_handoffs_do_not_open_the_circuit(stack: Stack, error: HandoffDeclined) -> None:
    """The next handoff is still tried. Too little time is reported, as when the gateway predicts it."""
    stack.small.logprob, stack.large.by_cost = -2.0, error
    for number in range(6):
        reply = await stack.chat([{"role": "user", "content": f"{number} {LONG}"}])
        assert report(reply)["tier"] == "large"
        paths = ("fallback:no_time",) if isinstance(error, NoTime) else ("prefill", "exact")
        assert report(reply)["path"] in paths
    assert len(stack.large.requests("transfer")) == 6
    stack.large.by_cost = None
    assert report(await stack.chat([{"role": "user", "content": f"And now {LONG}"}]))["path"] == "mapped"


async def test_a_forced_handoff_ignores_cost(stack: Stack) -> None:
    stack.large.by_cost = PrefillCheaper("prefill is cheaper")
    assert report(await stack.escalate())["path"] == "mapped"
    assert stack.large.requests("transfer")[0]["by_cost"] is False


def num_fallbacks(stack: Stack) -> float:
    metrics = stack.app.state.gateway.parts.metrics.full_prefill_fallback.collect()
    samples = [sample for metric in metrics for sample in metric.samples]
    return sum(float(sample.value) for sample in samples if sample.name.endswith("_total"))


async def test_all_but_the_tail_of_the_prompt_is_handed_over(stack: Stack) -> None:
    reply = await stack.escalate()
    (transfer,) = stack.large.requests("transfer")
    assert transfer["num_tokens"] == report(reply)["handoff_tokens"] == NUM_TOKENS - 64
    assert transfer["native_head"] == 4
    assert transfer["source_worker"] == "small-0"
    assert report(reply)["mapped_tokens"] == NUM_TOKENS - 64 - 4


async def test_a_forced_escalation_prefills_on_small_and_does_not_decode(stack: Stack) -> None:
    reply = await stack.escalate()
    assert report(reply)["forced"] is True
    assert len(stack.small.requests("prefill")) == 1
    assert "stable_messages" not in stack.small.requests("prefill")[0]
    assert stack.small.requests("chat") == stack.small.requests("cached_chat") == []


async def test_the_report_contains_times(stack: Stack) -> None:
    kvrelay = report(await stack.escalate())
    assert 0 < kvrelay["handoff_ttft_ms"] <= kvrelay["ttft_ms"]
    assert kvrelay["map_ms"] == 2.0
    assert kvrelay["copy_ms"] == 1.0
    assert kvrelay["bytes"] > 0
    assert kvrelay["transfer_ms"] > 0


async def test_a_short_prompt_is_not_handed_over(stack: Stack) -> None:
    short = [{"role": "user", "content": "Why?"}]
    reply = await stack.escalate(short)
    assert (report(reply)["path"], text(reply)) == ("prefill", right_answer(stack.large, short))
    assert stack.large.requests("transfer") == []


@pytest.mark.parametrize(("model", "tier"), [("small", "small"), ("large", "large"), ("fake-large", "large")])
async def test_a_named_model_answers_itself(stack: Stack, model: str, tier: str) -> None:
    reply = await stack.chat(model=model)
    assert (report(reply)["tier"], report(reply)["forced"], report(reply)["path"]) == (tier, True, "prefill")
    assert len((stack.small if tier == "small" else stack.large).requests("chat")) == 1


async def test_the_fixed_policy_uses_its_tier() -> None:
    async with in_process(policy={"name": "fixed", "tier": "large"}) as stack:
        assert report(await stack.chat())["tier"] == "large"
        assert report(await stack.chat(kvrelay={"max_tier": "small"}))["tier"] == "small"


async def test_max_tier_prevents_escalation(stack: Stack) -> None:
    stack.small.logprob = -2.0
    reply = await stack.chat(kvrelay={"max_tier": "small"})
    assert (report(reply)["tier"], report(reply)["path"]) == ("small", "prefill")


@pytest.mark.parametrize("transfers", [True, False])
async def test_escalations_have_priority(stack: Stack, transfers: bool) -> None:
    if not transfers:
        stack.large.fail("transfer", BundleUnusable("no bundle"))
    await stack.escalate()
    (body,) = stack.large.requests("cached_chat" if transfers else "chat")
    assert body["priority"] == ESCALATION_PRIORITY
    assert all(call["priority"] == 0 for call in stack.small.requests("cached_chat") + stack.small.requests("chat"))


async def test_exact_never_uses_a_mapped_cache(stack: Stack) -> None:
    mapped = await stack.escalate()
    assert report(mapped)["path"] == "mapped"
    reply = await stack.escalate(follow_up(MESSAGES, mapped, "And then?"), exact=True)
    assert report(reply)["path"] == "prefill"
    assert report(reply)["mapped_tokens"] == 0
    assert stack.large.requests("chat")[-1]["kv_transfer_params"]["require_exact"] is True


async def test_no_cache_neither_uses_nor_stores_caches(stack: Stack) -> None:
    await stack.escalate()
    await stack.chat(model="large", kvrelay={"exact": True})
    before = len(stack.large.caches), len(stack.small.caches)
    assert report(await stack.chat(model="large", kvrelay={"no_cache": True}))["cached_tokens"] == 0
    reply = await stack.escalate(no_cache=True)
    assert report(reply)["path"] == "prefill"
    assert text(reply) == right_answer(stack.large, MESSAGES)
    stack.small.logprob = -2.0
    cascaded = await stack.chat(kvrelay={"no_cache": True})
    assert (report(cascaded)["tier"], report(cascaded)["path"]) == ("large", "prefill")
    assert (len(stack.large.caches), len(stack.small.caches)) == before
    assert len(stack.large.requests("transfer")) == 1


@pytest.mark.parametrize("share", [0.0, 1.0])
async def test_a_share_of_handoffs_is_compared_with_a_native_prefill(share: float) -> None:
    async with in_process(shadow={"share": share}) as stack:
        first = await stack.escalate()
        second = await stack.escalate(follow_up(MESSAGES, first, "And then?"))
        assert report(second)["transfer_ms"] is None, "answered from its own cache, without a handoff"
        shadows = [body["kv_transfer_params"]["shadow"] for body in stack.large.requests("cached_chat")]
        assert shadows == [share == 1.0, False]


async def test_an_agreement_probe_is_forwarded_and_reported(stack: Stack) -> None:
    reply = await stack.escalate(agreement_probe=16)
    assert stack.large.requests("cached_chat")[0]["kv_transfer_params"]["agreement_probe"] == 16
    assert (report(reply)["top1_agreement"], report(reply)["full_prefill_ms"]) == (0.875, 50.0)


async def test_a_follow_up_extends_the_large_models_mapped_cache(stack: Stack) -> None:
    first = await stack.escalate()
    second = follow_up(MESSAGES, first, "And then?")
    reply = await stack.escalate(second)
    assert report(reply)["path"] == "mapped"
    assert text(reply) == right_answer(stack.large, second)
    assert len(stack.large.requests("transfer")) == 1, "the large model reuses its own cache"
    assert len(stack.small.requests("prefill")) == 1, "no small prefill for a prefix that the large model has cached"


async def test_a_follow_up_prefers_an_exact_cache(stack: Stack) -> None:
    first = await stack.chat(model="large")
    reply = await stack.escalate(follow_up(MESSAGES, first, "And then?"))
    assert report(reply)["path"] == "exact"
    assert stack.large.requests("transfer") == []
    assert reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 600


async def test_mapped_tokens_do_not_count_as_cached(stack: Stack) -> None:
    reply = await stack.escalate()
    assert report(reply)["mapped_tokens"] > 500
    assert reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_a_short_cached_prefix_does_not_prevent_a_handoff(stack: Stack) -> None:
    """With its own cache of the system prompt, the large model would still prefill nearly everything."""
    stack.large.rates = Rates(prefill_tokens_per_s=500.0, map_tokens_per_s=50_000.0)
    await stack.check_health()
    brief = {"role": "system", "content": "Answer from the document."}
    await stack.chat([brief, {"role": "user", "content": "Hello?"}], model="large")
    reply = await stack.escalate([brief, {"role": "user", "content": f"{SYSTEM['content']} What is word7?"}])
    assert report(reply)["path"] == "mapped"
    assert report(reply)["handoff_tokens"] > 500


async def test_a_stable_prefix_is_shared_between_conversations(stack: Stack) -> None:
    await stack.chat(model="large")
    reply = await stack.chat([SYSTEM, {"role": "user", "content": "Something else?"}], model="large")
    assert report(reply)["path"] == "exact"
    assert len(stack.large.requests("cached_chat")) == 1


async def test_cache_control_marks_the_stable_prefix(stack: Stack) -> None:
    document = {"type": "text", "text": SYSTEM["content"], "cache_control": {"type": "ephemeral"}}
    marked = [{"role": "user", "content": [document]}, USER]
    await stack.chat(marked, model="large")
    (body,) = stack.large.requests("chat")
    assert body["stable_messages"] == 1
    assert body["messages"][0] == {"role": "user", "content": SYSTEM["content"]}, "workers do not receive the mark"


async def test_logprobs_are_returned_only_on_request(stack: Stack) -> None:
    assert (await stack.chat()).json()["choices"][0]["logprobs"] is None
    choice = (await stack.chat(logprobs=True)).json()["choices"][0]
    assert [token["logprob"] for token in choice["logprobs"]["content"]] == [-0.125] * 7


async def test_a_tool_call_is_returned_complete(stack: Stack) -> None:
    stack.large.tool_call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"x": 1}'}}
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    reply = await stack.chat(model="large", tools=tools)
    choice = reply.json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"x": 1}'}
    assert stack.large.requests("chat")[0]["tools"] == tools


async def test_all_workers_receive_the_same_tools(stack: Stack) -> None:
    """With other tools the prompt renders to other tokens, and the handed-over cache does not match."""
    parameters = {"type": "object", "properties": {"x": {"type": "integer", "default": None}}}
    tools = [{"type": "function", "function": {"name": "look", "parameters": parameters, "strict": None}}]
    reply = await stack.chat(tools=tools, kvrelay={"policy": "always_escalate"})
    assert report(reply)["path"] == "mapped"
    prefill, answer = stack.small.requests("prefill")[0], stack.large.requests("cached_chat")[0]
    assert prefill["tools"] == answer["tools"] == tools


async def test_the_small_prefix_is_registered_and_reused(stack: Stack) -> None:
    first, second = await stack.chat(), await stack.chat()
    assert (report(first)["path"], report(second)["path"]) == ("prefill", "exact"), "its own prefill is not a hit"
    assert (report(first)["cached_tokens"], report(second)["cached_tokens"]) == (0, NUM_TOKENS)
    assert len(stack.small.requests("prefill")) == 1, "the same prompt is not prefilled again"
    assert stack.metric("prefix_lookup_hits_total", tier="small") == 1


async def test_a_single_tier_answers_everything() -> None:
    tiers = [{"name": "small", "model": "fake-small"}]
    workers = {"small-0": {"tier": "small", "url": "http://small-0"}}
    async with in_process(tiers=tiers, workers=workers) as stack:
        assert report(await stack.chat())["tier"] == "small"
        assert report(await stack.escalate())["tier"] == "small"
