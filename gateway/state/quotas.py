"""Quotas: a tenant's requests and tokens per minute, and the tokens spent of budgets.

Counts live where the registry does: in this process, or in the Redis that gateways share. While that Redis is
unavailable, each gateway counts for itself, so no request is rejected for its sake, and the limits still hold per
process. Tokens are counted when a request ends, however it ended: the prompt once, and what every model generated for
it. A tenant that has used up a minute's quota is rejected until the next minute.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from limits import RateLimitItem, RateLimitItemPerDay, RateLimitItemPerHour, RateLimitItemPerMinute
from limits.aio.storage import MemoryStorage, RedisStorage
from limits.aio.strategies import FixedWindowRateLimiter

from gateway.errors import RateLimited
from gateway.policies.base import Budget
from gateway.state.tenants import Tenant

if TYPE_CHECKING:
    from gateway.state.redis import SharedRedis

KEY_PREFIX = "kvrelay:quota"
REQUESTS, TOKENS, BUDGET, EVERYONE = "requests", "tokens", "budget", "*"
MINUTE_S = 60.0
UNLIMITED = 2**53  # tokens; a budget's window is counted whatever the budget is
WINDOWS = {"minute": RateLimitItemPerMinute, "hour": RateLimitItemPerHour, "day": RateLimitItemPerDay}

Counter = tuple[RateLimitItem, tuple[str, ...]]  # a window, and the identifiers that it is counted under


class Quotas:
    def __init__(self, redis: SharedRedis | None = None, now: Callable[[], float] = time.time):
        """Count in this process, or in `redis`, which the caller closes. `now` is in Unix seconds."""
        self._redis = redis
        self._now = now
        self._local = FixedWindowRateLimiter(MemoryStorage())
        self._shared = self._local if redis is None else FixedWindowRateLimiter(_redis_storage(redis))
        self._charging: set[asyncio.Task[None]] = set()

    async def admit(self, tenant: Tenant) -> None:
        """Count one request. Raises `RateLimited` if the tenant has used up this minute's requests or tokens."""
        if tenant.requests_per_minute is not None:
            limit = RateLimitItemPerMinute(tenant.requests_per_minute)
            if not await self._run("quota_hit", lambda limiter: limiter.hit(limit, REQUESTS, tenant.name)):
                raise await self._rate_limited(limit, REQUESTS, tenant)
        if tenant.tokens_per_minute is not None:
            limit = RateLimitItemPerMinute(tenant.tokens_per_minute)
            if not await self._run("quota_test", lambda limiter: limiter.test(limit, TOKENS, tenant.name)):
                raise await self._rate_limited(limit, TOKENS, tenant)

    async def overspent(self, tenant: Tenant, budgets: Sequence[Budget]) -> frozenset[Budget]:
        """Return the budgets that are used up."""
        return frozenset([budget for budget in budgets if await self._spent(tenant, budget) >= budget.tokens])

    async def charge(
        self, tenant: Tenant, num_tokens: int, *, by_tier: Mapping[str, int] = {}, budgets: Sequence[Budget] = ()
    ) -> None:
        """Count a request's tokens, even beyond a limit; `by_tier` counts towards `budgets`.

        Completes even if the caller is cancelled meanwhile.
        """
        now_s = self._now()
        costs = {_budget_counter(tenant, budget, now_s): by_tier.get(budget.tier, 0) for budget in budgets}
        if tenant.tokens_per_minute is not None:
            costs[RateLimitItemPerMinute(tenant.tokens_per_minute), (TOKENS, tenant.name)] = num_tokens
        if any(costs.values()):
            task = asyncio.create_task(self._charge(costs))
            self._charging.add(task)
            task.add_done_callback(self._charging.discard)
            await asyncio.shield(task)

    async def aclose(self) -> None:
        if self._charging:
            await asyncio.wait(self._charging)

    async def _charge(self, costs: Mapping[Counter, int]) -> None:
        for (window, identifiers), cost in costs.items():
            if cost > 0:
                await self._run("quota_hit", partial(_hit, window, identifiers, cost))

    async def _spent(self, tenant: Tenant, budget: Budget) -> float:
        window, identifiers = _budget_counter(tenant, budget, self._now())

        async def spent(limiter: FixedWindowRateLimiter) -> float:
            return window.amount - (await limiter.get_window_stats(window, *identifiers)).remaining

        return await self._run("quota_test", spent)

    async def _rate_limited(self, limit: RateLimitItemPerMinute, what: str, tenant: Tenant) -> RateLimited:
        async def resets_at(limiter: FixedWindowRateLimiter) -> float:
            return float((await limiter.get_window_stats(limit, what, tenant.name)).reset_time)

        wait_s = min(max(1.0, await self._run("quota_test", resets_at) - time.time()), MINUTE_S)
        return RateLimited(f"more than {limit.amount} {what} in a minute", retry_after_s=wait_s)

    async def _run(self, op: str, call: Callable[[FixedWindowRateLimiter], Awaitable[float]]) -> float:
        """Call with the shared limiter; with this process's own while Redis is unavailable."""
        if self._redis is not None:
            result = await self._redis.run(op, lambda: call(self._shared))
            if result is not None:
                return result
        return await call(self._local)


def _redis_storage(redis: SharedRedis) -> RedisStorage:
    return RedisStorage(
        "async+redis://",  # the pool knows the address
        implementation="redispy",
        key_prefix=KEY_PREFIX,
        connection_pool=redis.pool,  # type: ignore[arg-type]
    )


def _budget_counter(tenant: Tenant, budget: Budget, now_s: float) -> Counter:
    """Return the counter of a budget's spending.

    Budgets that differ only in their amount share it. Each window of the clock has its own, which is kept for a
    window's length from its first charge, and so beyond the window's end.
    """
    owner = tenant.name if budget.of == "tenant" else EVERYONE
    window = WINDOWS[budget.per](UNLIMITED)
    return window, (BUDGET, budget.tier, owner, str(int(now_s // window.get_expiry())))


def _hit(
    window: RateLimitItem, identifiers: tuple[str, ...], cost: int, limiter: FixedWindowRateLimiter
) -> Awaitable[bool]:
    return limiter.hit(window, *identifiers, cost=cost)
