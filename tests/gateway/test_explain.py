"""`/v1/cascade/explain`: the decision, without running a model."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.gateway.stack import MESSAGES, Stack, eventually, follow_up, in_process, live_stack, report
from workers.api.errors import WorkerUnavailable
from workers.api.schemas import Rates

MODEL_CALLS = ("prefill", "transfer", "chat", "cached_chat")


async def explain(stack: Stack, messages: list[dict[str, Any]] = MESSAGES, **fields: Any) -> dict[str, Any]:
    before = [call for worker in (stack.small, stack.large) for call in worker.calls if call.name in MODEL_CALLS]
    reply = await stack.http.post("/v1/cascade/explain", json={"model": "auto", "messages": messages} | fields)
    after = [call for worker in (stack.small, stack.large) for call in worker.calls if call.name in MODEL_CALLS]
    assert reply.status_code == 200, reply.text
    assert before == after, "no model runs"
    return dict(reply.json())


@pytest.mark.parametrize(
    ("fields", "route", "would_escalate", "reason"),
    [
        ({}, "cascade", None, "faster"),
        ({"model": "large"}, "answer", False, None),
        ({"kvrelay": {"policy": "always_escalate"}}, "escalate", True, "faster"),
        ({"kvrelay": {"policy": "always_escalate", "exact": True}}, "escalate", True, "exact"),
        ({"kvrelay": {"no_cache": True}}, "cascade", None, "no_cache"),
        ({"kvrelay": {"max_tier": "small"}}, "answer", False, None),
    ],
)
async def test_the_explained_route(
    stack: Stack, fields: dict[str, Any], route: str, would_escalate: bool | None, reason: str | None
) -> None:
    answer = await explain(stack, **fields)
    assert (answer["route"], answer["would_escalate"]) == (route, would_escalate)
    assert answer["would_transfer"] is (reason == "faster")
    assert (answer["escalation"] or {}).get("reason") == reason


async def test_slow_tokenizing_is_worker_time_and_ends_on_disconnect() -> None:
    async with live_stack() as stack:
        stack.small.delay("tokenize", 0.5)
        reply = await stack.chat(kvrelay={"explain": True})
        assert report(reply)["explained"]["num_tokens"]
        assert float(reply.headers["x-kvrelay-overhead-ms"]) < report(reply)["ttft_ms"] - 500
        assert stack.metric("prefix_lookups_total", tier="small") == 1, "explanation and answer share one lookup"
        request = asyncio.create_task(
            stack.http.post("/v1/cascade/explain", json={"model": "auto", "messages": MESSAGES})
        )
        stack.small.delay("tokenize", 30.0)
        await eventually(lambda: len(stack.small.requests("tokenize")) == 2)
        request.cancel()
        await eventually(lambda: stack.small.num_disconnects == 1)
        await eventually(lambda: stack.metric("client_disconnects_total", phase="admission") == 1)


async def test_an_explanation_counts_towards_the_tenants_concurrency() -> None:
    async with in_process(limits={"max_concurrency_per_tenant": 1}) as stack:
        stack.small.delay("tokenize", 1.0)
        body = {"model": "auto", "messages": MESSAGES}
        first = asyncio.create_task(stack.http.post("/v1/cascade/explain", json=body))
        await eventually(lambda: bool(stack.small.requests("tokenize")))
        assert (await stack.http.post("/v1/cascade/explain", json=body)).status_code == 429
        assert (await first).status_code == 200


async def test_without_a_bundle_a_full_prefill_is_explained(stack: Stack) -> None:
    stack.large.peers = {}
    await stack.check_health()
    answer = await explain(stack)
    assert answer["would_transfer"] is False
    assert answer["escalation"] == {"from": "full_prefill", "reason": "no_bundle"}
    assert answer["predicted_ms"]["handoff"] is None


async def test_the_targets_own_cache_is_explained(stack: Stack) -> None:
    first = await stack.escalate()
    following = follow_up(MESSAGES, first, "And then?")
    assert (await explain(stack, following))["escalation"]["from"] == "own_mapped"
    assert (await explain(stack))["predicted_ms"]["small_prefill"] == 0, "the small model has cached the whole prompt"


async def test_predictions_use_the_workers_rates_and_token_count(stack: Stack) -> None:
    stack.large.rates = Rates(prefill_tokens_per_s=1000.0, map_tokens_per_s=10_000.0)
    await stack.check_health()
    answer = await explain(stack)
    num_tokens = answer["num_tokens"]
    assert num_tokens > 600
    assert answer["predicted_ms"]["full_prefill"] == pytest.approx(num_tokens)
    assert answer["predicted_ms"]["handoff"] == pytest.approx(64 + (num_tokens - 64) / 10)
    assert answer["predicted_ms"]["small_prefill"] == pytest.approx(num_tokens / 200 * 1000), "an assumed rate"


async def test_the_known_prefix_is_explained(stack: Stack) -> None:
    assert (await explain(stack))["prefix"] == {"small": None, "large": None}
    first = await stack.escalate()
    prefix = (await explain(stack, follow_up(MESSAGES, first, "And then?")))["prefix"]
    assert prefix["large"]["provenance"] == "mapped:fake-bundle"
    assert prefix["large"]["num_messages"] == 3
    assert prefix["small"]["num_messages"] == 2


async def test_without_a_token_count_the_predictions_are_null(stack: Stack) -> None:
    stack.small.fail("tokenize", WorkerUnavailable("gone"))
    answer = await explain(stack)
    assert answer["num_tokens"] is None
    assert answer["predicted_ms"] == {"small_prefill": None, "full_prefill": None, "handoff": None}


async def test_invalid_requests_are_refused_as_in_chat(stack: Stack) -> None:
    reply = await stack.http.post("/v1/cascade/explain", json={"model": "gpt-17", "messages": MESSAGES})
    assert reply.status_code == 404


async def test_an_answer_includes_its_explanation_on_request(stack: Stack) -> None:
    assert "explained" not in report(await stack.chat())
    assert report(await stack.chat(kvrelay={"explain": True}))["explained"]["route"] == "cascade"
