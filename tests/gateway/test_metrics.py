"""The exported metrics, whose labels never contain text from clients."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.gateway.stack import MESSAGES, Stack, live_stack, report

EXPORTED = """
requests_total time_to_first_token_seconds inter_token_latency_seconds e2e_request_latency_seconds
request_prefill_time_seconds prefix_lookups_total prefix_lookup_hits_total prefix_lookup_stale_total
num_requests_running num_requests_waiting
cascade_decisions_total cascade_confidence handoffs_total handoff_duration_seconds
full_prefill_fallback_total prefill_seconds_saved_total circuit_state circuit_transitions_total
registry_ops_total client_disconnects_total overhead_seconds
""".split()


async def scrape(stack: Stack) -> str:
    reply = await stack.http.get("/metrics")
    assert reply.status_code == 200
    return reply.text


async def test_all_expected_metrics_are_exported(stack: Stack) -> None:
    families = {family.name for family in text_string_to_metric_families(await scrape(stack))}
    assert {f"kvrelay_{name.removesuffix('_total')}" for name in EXPORTED} <= families
    assert all(name.startswith("kvrelay_") for name in families)


async def test_worker_metrics_are_not_exported_by_the_gateway(stack: Stack) -> None:
    await stack.escalate()
    exported = await scrape(stack)
    assert "kvrelay_handoffs_total" in exported
    assert "kvrelay_kv_transfer" not in exported and "kvrelay_prefix_cache" not in exported


async def test_a_handoff_is_measured(stack: Stack) -> None:
    stack.small.logprob = -2.0
    await stack.chat()
    assert stack.metric("handoffs_total", result="ok") == 1
    assert stack.metric("handoff_duration_seconds_count") == 1
    assert stack.metric("prefill_seconds_saved_total") > 0
    assert stack.metric("cascade_confidence_bucket", le="-2.0") == 1
    assert stack.metric("cascade_decisions_total", policy="confidence", decision="escalate", reason="unsure") == 1
    assert stack.metric("time_to_first_token_seconds_count", tier="large", path="mapped") == 1
    assert stack.metric("e2e_request_latency_seconds_count", tier="large") == 1
    assert stack.metric("overhead_seconds_count") == 1
    assert stack.metric("requests_total", model="auto", status="200") == 1


async def test_inter_token_latency_is_measured_for_streams() -> None:
    """A whole answer may arrive in few chunks, so it is not measured."""
    async with live_stack() as stack:
        stack.large.answer, stack.large.token_s = "one two three", 0.05
        await stack.chat(model="large")
        assert stack.metric("inter_token_latency_seconds_count", tier="large") == 0
        await stack.chat(model="large", stream=True)
        assert stack.metric("inter_token_latency_seconds_count", tier="large") >= 2
        assert stack.metric("inter_token_latency_seconds_sum", tier="large") > 0.075


async def test_decisions_are_counted_by_policy(stack: Stack) -> None:
    await stack.chat()
    await stack.escalate()
    await stack.chat(model="fake-large")
    assert stack.metric("cascade_decisions_total", policy="confidence", decision="accept", reason="confident") == 1
    assert stack.metric("cascade_decisions_total", policy="always_escalate", decision="escalate", reason="forced") == 1
    assert stack.metric("cascade_decisions_total", policy="named", decision="answer", reason="named") == 1


async def test_labels_never_contain_client_text(stack: Stack) -> None:
    for number in range(20):
        await stack.chat(model=f"canary-{number}")
        await stack.http.get(f"/canary-{number}", headers={"x-request-id": f"canary-{number}"})
    await stack.chat([{"role": "user", "content": "canary-prompt"}], user="canary-user")
    assert "canary" not in await scrape(stack)
    assert stack.metric("requests_total", model="other", status="404") == 20


async def test_health_checks_are_not_counted(stack: Stack) -> None:
    await stack.http.get("/livez")
    assert "livez" not in await scrape(stack)
    assert stack.metric("requests_total", model="none", status="200") == 0


async def test_overhead_excludes_worker_time(stack: Stack) -> None:
    stack.large.delay("chat", 0.5)
    stack.large.token_s = 0.05
    reply = await stack.chat(MESSAGES, model="large")
    assert float(reply.headers["x-kvrelay-overhead-ms"]) < 300
    assert stack.metric("overhead_seconds_sum") < 0.3


async def test_the_map_rate_excludes_reused_tokens(stack: Stack) -> None:
    """Reused tokens take no time."""
    large = stack.app.state.gateway.parts.fleet.tiers["large"].workers["large-0"]
    stack.large.reused_tokens = 300
    handed_over = report(await stack.escalate())["handoff_tokens"]
    assert large.map_tokens_per_s == pytest.approx((handed_over - 300) / 3.0 * 1000)  # the fake reports 3 ms
