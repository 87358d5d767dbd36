"""Quotas and budgets, in this process and in Redis, and while Redis is unavailable."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from limits import RateLimitItemPerMinute
from redis.asyncio import Redis

from gateway.errors import RateLimited
from gateway.policies.base import Budget
from gateway.settings import RegistrySettings, from_values
from gateway.state.quotas import TOKENS, Quotas
from gateway.state.registry import connect
from gateway.state.tenants import Tenant
from tests.gateway.redis_process import redis_process
from tests.gateway.stack import LONG, MESSAGES, Stack, eventually, in_process, live_stack, report, values
from tools.fake_worker import render
from workers.api.config import SettingsError
from workers.api.schemas import Message


def tenant(name: str, *, requests: int | None = None, tokens: int | None = None) -> Tenant:
    return Tenant(name, "ab" * 32, None, ("small",), requests, tokens)


@asynccontextmanager
async def counting(url: str, now: Callable[[], float] = time.time) -> AsyncIterator[Quotas]:
    """Quotas with a long timeout, for a busy machine."""
    registry = connect(RegistrySettings.model_construct(url=url, timeout_ms=10_000), lambda op, result: None)
    quotas = Quotas(registry.redis, now)
    yield quotas
    await quotas.aclose()
    await registry.aclose()


async def num_admitted(quotas: Quotas, tenant: Tenant, tries: int = 5) -> int:
    for count in range(tries):
        try:
            await quotas.admit(tenant)
        except RateLimited as error:
            assert error.retry_after_s is not None and 1 <= error.retry_after_s <= 60
            return count
    return tries


async def the_contract(quotas: Quotas) -> None:
    assert await num_admitted(quotas, tenant("a", requests=3)) == 3
    assert await num_admitted(quotas, tenant("b", requests=2)) == 2, "counted per tenant"
    assert await num_admitted(quotas, tenant("free")) == 5
    writer = tenant("writer", tokens=100)
    for spent in (60, 60):
        await quotas.admit(writer)
        await quotas.charge(writer, spent)
    assert await num_admitted(quotas, writer) == 0, "tokens beyond the limit count too"


async def the_budgets(quotas: Quotas) -> None:
    """Budgets are counted by tier, window and owner, not by amount."""
    mine = Budget(tier="large", tokens=100)
    everyones = mine.model_copy(update={"of": "everyone", "tokens": 150})
    hourly, raised = mine.model_copy(update={"per": "hour"}), mine.model_copy(update={"tokens": 1000})
    counted, budgets = (mine, everyones), (mine, everyones, hourly, raised)
    await quotas.charge(tenant("a"), 599, by_tier={"large": 99, "small": 500}, budgets=counted)
    assert await quotas.overspent(tenant("a"), budgets) == set()
    await quotas.charge(tenant("a"), 1, by_tier={"large": 1}, budgets=counted)
    assert await quotas.overspent(tenant("a"), budgets) == {mine}
    await quotas.charge(tenant("b"), 50, by_tier={"large": 50}, budgets=counted)
    assert await quotas.overspent(tenant("b"), budgets) == {everyones}


def utc(year: int, month: int, day: int, hour: int = 0, minute: int = 0, second: int = 0) -> float:
    return datetime(year, month, day, hour, minute, second, tzinfo=UTC).timestamp()


async def the_clocks_windows(url: str) -> None:
    """A budget starts again with the clock's minute, hour and day, whenever it was first charged."""
    clock = [utc(2026, 11, 29, 23, 59, 59)]
    minute, hour, day = (Budget(tier="large", tokens=10, per=per) for per in ("minute", "hour", "day"))
    budgets = (minute, hour, day)
    async with counting(url, lambda: clock[0]) as quotas:
        await quotas.charge(tenant("clocked"), 10, by_tier={"large": 10}, budgets=budgets)
        for at, used_up in (
            (utc(2026, 11, 29, 23, 59, 0), {minute, hour, day}),
            (utc(2026, 11, 29, 23, 0, 0), {hour, day}),
            (utc(2026, 11, 29, 0, 0, 0), {day}),
            (utc(2026, 11, 30, 0, 0, 0), set()),
        ):
            clock[0] = at
            assert await quotas.overspent(tenant("clocked"), budgets) == used_up


async def test_counts_in_this_process() -> None:
    await the_clocks_windows("memory://")
    async with counting("memory://") as quotas:
        await the_contract(quotas)
        await the_budgets(quotas)


async def test_counts_in_redis_and_locally_without_it(require_tool: Callable[[str], str], tmp_path: Path) -> None:
    with redis_process(require_tool("redis-server"), tmp_path) as redis:
        await the_clocks_windows(redis.url)
        async with Redis.from_url(redis.url) as client:
            lifetimes_s = sorted([await client.ttl(key) for key in await client.keys("*")])
            assert [round(life / 10) * 10 for life in lifetimes_s] == [60, 3600, 86_400], "the keys expire"
        async with counting(redis.url) as one, counting(redis.url) as other:
            await the_contract(one)
            await the_budgets(other)
            assert await num_admitted(other, tenant("a", requests=3)) == 0, "the other gateway counted three"
            redis.kill()
            assert await num_admitted(other, tenant("a", requests=3)) == 3
            with pytest.raises(RateLimited, match="more than 3 requests in a minute"):
                await other.admit(tenant("a", requests=3))


MOST = 1_000_000
COUNTING = {"default": {"tokens_per_minute": MOST}}
NUM_READ = len(render([Message.model_validate(message) for message in MESSAGES]))


async def num_spent(stack: Stack) -> int:
    """Tokens spent by the default tenant in this minute."""
    limiter = stack.app.state.gateway.parts.quotas._local
    stats = await limiter.get_window_stats(RateLimitItemPerMinute(MOST), TOKENS, "default")
    return int(MOST - stats.remaining)


@pytest.mark.parametrize(
    ("policy", "num_unsent"),
    [
        ({"name": "confidence", "num_tokens": 3}, 1),
        ({"name": "verifier"}, 7 + 1),
    ],  # rejected after one token; the whole answer, and No
)
async def test_unsent_tokens_are_charged(policy: dict[str, Any], num_unsent: int) -> None:
    async with in_process(tenants=COUNTING, policy=policy) as stack:
        stack.small.logprob = -9.0
        usage = (await stack.chat()).json()["usage"]
        assert usage["prompt_tokens"] == NUM_READ
        assert await num_spent(stack) == usage["total_tokens"] + num_unsent, "the prompt counts once"


async def test_broken_stream_is_charged_for_what_arrived() -> None:
    async with in_process(tenants=COUNTING) as stack:
        stack.small.break_after = 5
        assert "error" in (await stack.chat(stream=True)).text
        assert await num_spent(stack) == NUM_READ + 5


@pytest.mark.parametrize("model", ["auto", "small"])
async def test_disconnected_client_is_charged(model: str) -> None:
    """The length of the prompt is unknown, and estimated from its bytes."""
    async with live_stack(tenants=COUNTING) as stack:
        stack.small.stall("cached_chat" if model == "auto" else "chat", after=4)
        body = {"model": model, "messages": MESSAGES, "stream": True}
        async with stack.http.stream("POST", "/v1/chat/completions", json=body) as reply:
            async for line in reply.aiter_lines():
                if "content" in line and '"content":""' not in line:
                    break
        await eventually(lambda: stack.small.num_disconnects == 1)
        spent = await once_spent(stack)
        assert NUM_READ <= spent <= NUM_READ + 4 if model == "auto" else NUM_READ <= spent <= 3 * NUM_READ


@pytest.mark.parametrize(("model", "call"), [("auto", "prefill"), ("small", "chat")])
async def test_disconnect_before_the_first_token_is_charged(model: str, call: str) -> None:
    async with live_stack(tenants=COUNTING) as stack:
        await hang_up_once_called(stack, "/v1/chat/completions", call, model=model, messages=MESSAGES)
        assert NUM_READ <= await once_spent(stack) <= 3 * NUM_READ


@pytest.mark.parametrize("body", [{"messages": MESSAGES}, {"prefix": LONG}])
async def test_disconnect_during_a_prefix_call_is_charged(body: dict[str, Any]) -> None:
    async with live_stack(tenants=COUNTING) as stack:
        await hang_up_once_called(stack, "/v1/prefix/prefill", "prefill", **body)
        assert NUM_READ * 0.9 <= await once_spent(stack) <= 3 * NUM_READ


@pytest.mark.parametrize("model", ["auto", "small"])
async def test_disconnect_in_the_queue_is_not_charged(model: str) -> None:
    limits = {"max_concurrency_per_tier": 1, "max_queue_per_tier": 8}
    async with live_stack(tenants=COUNTING, limits=limits) as stack:
        stack.small.delay("prefill", 30.0)
        stack.small.delay("chat", 30.0)
        first = asyncio.create_task(stack.chat(model=model))
        await eventually(lambda: stack.metric("num_requests_running", tier="small") == 1)
        second = asyncio.create_task(stack.chat(model=model))
        await eventually(lambda: stack.metric("num_requests_waiting", tier="small") == 1)
        second.cancel()
        await eventually(lambda: stack.metric("num_requests_waiting", tier="small") == 0)
        await asyncio.sleep(0.1)
        assert await num_spent(stack) == 0
        first.cancel()
        assert await once_spent(stack) > 0


async def hang_up_once_called(stack: Stack, path: str, call: str, **body: Any) -> None:
    stack.small.delay(call, 30.0)
    asking = asyncio.create_task(stack.http.post(path, json=body))
    await eventually(lambda: bool(stack.small.requests(call)))
    asking.cancel()
    await asyncio.wait({asking})


async def once_spent(stack: Stack) -> int:
    async with asyncio.timeout(20):
        while not (spent := await num_spent(stack)):  # noqa: ASYNC110 - the gateway runs in another thread
            await asyncio.sleep(0.01)
    return spent


async def test_charge_survives_cancellation() -> None:
    async with counting("memory://") as quotas:
        writer = tenant("writer", tokens=100)
        spending = asyncio.create_task(quotas.charge(writer, 200))
        await asyncio.sleep(0)
        spending.cancel()
        await asyncio.wait({spending})
        assert await num_admitted(quotas, writer) == 0


async def test_spent_budget_keeps_to_the_small_model() -> None:
    budget = {"tier": "large", "tokens": NUM_READ + 1}
    rule = {"name": "spent", "when": {"budget": budget}, "then": {"name": "fixed", "tier": "small"}}
    policy = {"name": "rules", "rules": [rule], "otherwise": {"name": "always_escalate"}}
    async with in_process(policy=policy) as stack:
        first, second = [report(await stack.chat()) for _ in range(2)]
        assert (first["tier"], first["rule"]) == ("large", None)
        assert (second["tier"], second["rule"]) == ("small", "spent")
        explained = await stack.http.post("/v1/cascade/explain", json={"model": "auto", "messages": MESSAGES})
        assert explained.json()["rule"] == "spent"


async def test_small_answers_count_for_no_other_budget() -> None:
    budget = {"tier": "large", "tokens": 1}
    rule = {"name": "spent", "when": {"budget": budget}, "then": {"name": "fixed", "tier": "small"}}
    async with in_process(policy={"name": "rules", "rules": [rule]}) as stack:
        assert [report(await stack.chat())["rule"] for _ in range(2)] == [None, None]
        stack.small.logprob = -2.0
        assert [report(await stack.chat())["rule"] for _ in range(2)] == [None, "spent"]


def test_budget_of_unknown_tier_is_rejected() -> None:
    rule = {"name": "spent", "when": {"budget": {"tier": "huge", "tokens": 1}}, "then": {"name": "fixed"}}
    with pytest.raises(SettingsError, match="budget of unknown tier 'huge'; known: small, large"):
        from_values(values(policy={"name": "rules", "rules": [rule]}))
