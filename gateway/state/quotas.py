"""How much a tenant may ask for in a minute: requests, and tokens read and written; and what was spent of budgets.

Counted where prefixes are filed: in this process, or in a Redis that several gateways share. While that Redis is gone,
each gateway counts for itself: nobody is turned away for its sake, and nobody gets past the limits of one process.
Tokens are counted when a turn ends, in whatever way: the prompt once, and what every model wrote for it, whether or not
it was shown. A tenant that has spent its minute's is turned away until the next one.
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
from gateway.policies.budget import Budget
from gateway.state.tenants import Tenant

if TYPE_CHECKING:
    from limits.aio.storage import Storage

    from gateway.state.redis import GuardedRedis

PREFIX = "kvrelay:quota"
REQUESTS, TOKENS, BUDGET, EVERYONE = "requests", "tokens", "budget", "*"
MINUTE_S = 60.0
WITHOUT_LIMIT = 2**53  # tokens; as a budget's window is counted whatever the budget is
WINDOWS = {"minute": RateLimitItemPerMinute, "hour": RateLimitItemPerHour, "day": RateLimitItemPerDay}

Account = tuple[RateLimitItem, tuple[str, ...]]  # a window, and whose it is


class Quotas:
    def __init__(self, redis: GuardedRedis | None = None, now: Callable[[], float] = time.time):
        """Without a `redis`, which stays its owner's to close, in this process. `now` is in Unix seconds."""
        self._redis = redis
        self._now = now
        self._own = Counted(MemoryStorage())
        self._shared = Counted(_in(redis)) if redis is not None else self._own
        self._spending: set[asyncio.Task[None]] = set()

    async def admit(self, tenant: Tenant) -> None:
        """Counts one request. Raises `RateLimited` where the minute's requests or tokens are used up."""
        if tenant.requests_per_minute is not None:
            most = RateLimitItemPerMinute(tenant.requests_per_minute)
            if not await self._asked("quota_hit", lambda counted: counted.limiter.hit(most, REQUESTS, tenant.name)):
                raise await self._used_up(most, REQUESTS, tenant)
        if tenant.tokens_per_minute is not None:
            most = RateLimitItemPerMinute(tenant.tokens_per_minute)
            if not await self._asked("quota_test", lambda counted: counted.limiter.test(most, TOKENS, tenant.name)):
                raise await self._used_up(most, TOKENS, tenant)

    async def overspent(self, tenant: Tenant, budgets: Sequence[Budget]) -> frozenset[Budget]:
        """Those of the budgets that are used up."""
        return frozenset([budget for budget in budgets if await self._spent_of(tenant, budget) >= budget.tokens])

    async def _spent_of(self, tenant: Tenant, budget: Budget) -> float:
        window, names = _account(tenant, budget, self._now())
        return await self._asked("quota_test", lambda counted: counted.spent(window, *names))

    async def spent(
        self, tenant: Tenant, num_tokens: int, *, by_tier: Mapping[str, int] = {}, budgets: Sequence[Budget] = ()
    ) -> None:
        """What a turn has cost, however much was left; of budgets, what each tier's answers have. Counted even when the
        caller is cancelled meanwhile."""
        now_s = self._now()
        charges = {_account(tenant, budget, now_s): by_tier.get(budget.tier, 0) for budget in budgets}
        if tenant.tokens_per_minute is not None:
            charges[RateLimitItemPerMinute(tenant.tokens_per_minute), (TOKENS, tenant.name)] = num_tokens
        if any(charges.values()):
            task = asyncio.create_task(self._charge(charges))
            self._spending.add(task)
            task.add_done_callback(self._spending.discard)
            await asyncio.shield(task)

    async def _charge(self, charges: Mapping[Account, int]) -> None:
        for (window, names), cost in charges.items():
            if cost > 0:
                await self._asked("quota_hit", partial(_hit, window, names, cost))

    async def aclose(self) -> None:
        if self._spending:
            await asyncio.wait(self._spending)

    async def _used_up(self, most: RateLimitItemPerMinute, what: str, tenant: Tenant) -> RateLimited:
        resets_at = await self._asked("quota_test", lambda counted: counted.resets_at(most, what, tenant.name))
        wait_s = min(max(1.0, float(resets_at) - time.time()), MINUTE_S)
        return RateLimited(f"more than {most.amount} {what} in a minute", retry_after_s=wait_s)

    async def _asked(self, op: str, ask: Callable[[Counted], Awaitable[float | bool]]) -> float | bool:
        if self._redis is not None:
            answer = await self._redis.bounded(op, lambda: ask(self._shared))
            if answer is not None:
                return answer
        return await ask(self._own)


class Counted:
    """The counts of one store."""

    def __init__(self, storage: Storage):
        self.limiter = FixedWindowRateLimiter(storage)

    async def spent(self, window: RateLimitItem, *identifiers: str) -> float:
        """Of a window without a limit."""
        return window.amount - (await self.limiter.get_window_stats(window, *identifiers)).remaining

    async def resets_at(self, most: RateLimitItemPerMinute, *identifiers: str) -> float:
        """In Unix seconds."""
        return float((await self.limiter.get_window_stats(most, *identifiers)).reset_time)


def _in(redis: GuardedRedis) -> RedisStorage:
    return RedisStorage(
        "async+redis://",  # which and where, the pool knows
        implementation="redispy",
        key_prefix=PREFIX,
        connection_pool=redis.pool,  # type: ignore[arg-type]
    )


def _account(tenant: Tenant, budget: Budget, now_s: float) -> Account:
    """Where the spending that a budget is about is counted: the same for budgets of other amounts, another one when the
    clock's next window begins. It is kept for a window's length from the first charge on, and so past its end."""
    whose = tenant.name if budget.of == "tenant" else EVERYONE
    window = WINDOWS[budget.per](WITHOUT_LIMIT)
    return window, (BUDGET, budget.tier, whose, str(int(now_s // window.get_expiry())))


def _hit(window: RateLimitItem, names: tuple[str, ...], cost: int, counted: Counted) -> Awaitable[bool]:
    return counted.limiter.hit(window, *names, cost=cost)
