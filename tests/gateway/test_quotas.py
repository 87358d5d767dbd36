"""The contract of the counts, in this process and in a Redis; and what becomes of them when Redis goes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gateway.errors import RateLimited
from gateway.quotas import Quotas
from gateway.settings import RegistrySettings
from gateway.tenants import Tenant
from tests.gateway.redis_process import redis_process


def tenant(name: str, *, requests: int | None = None, tokens: int | None = None) -> Tenant:
    return Tenant(name, "ab" * 32, None, ("small",), requests, tokens)


@asynccontextmanager
async def counting(url: str) -> AsyncIterator[Quotas]:
    """Waits longer than a request may, on however busy a machine."""
    settings = RegistrySettings.model_construct(url=url, timeout_ms=10_000)
    quotas = Quotas(settings, lambda op, result: None)
    yield quotas
    await quotas.aclose()


async def num_admitted(quotas: Quotas, who: Tenant, tries: int = 5) -> int:
    for count in range(tries):
        try:
            await quotas.admit(who)
        except RateLimited as error:
            assert error.retry_after_s is not None and 1 <= error.retry_after_s <= 60
            return count
    return tries


async def the_contract(quotas: Quotas) -> None:
    assert await num_admitted(quotas, tenant("a", requests=3)) == 3
    assert await num_admitted(quotas, tenant("b", requests=2)) == 2, "each its own"
    assert await num_admitted(quotas, tenant("free")) == 5
    writer = tenant("writer", tokens=100)
    for spent in (60, 60):
        await quotas.admit(writer)
        await quotas.spent(writer, spent)
    assert await num_admitted(quotas, writer) == 0, "what was over the limit counts too"


async def test_in_this_process() -> None:
    async with counting("memory://") as quotas:
        await the_contract(quotas)


async def test_in_redis_together_and_alone_without_it(require_tool: Callable[[str], str], tmp_path: Path) -> None:
    with redis_process(require_tool("redis-server"), tmp_path) as redis:
        async with counting(redis.url) as one, counting(redis.url) as other:
            await the_contract(one)
            assert await num_admitted(other, tenant("a", requests=3)) == 0, "another gateway has counted three"
            redis.kill()
            assert await num_admitted(other, tenant("a", requests=3)) == 3
            with pytest.raises(RateLimited, match="more than 3 requests in a minute"):
                await other.admit(tenant("a", requests=3))
