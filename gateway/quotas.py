"""How much a tenant may ask for in a minute: requests, and tokens read and written.

Counted where prefixes are filed: in this process, or in a Redis that several gateways share. While that Redis is gone,
each gateway counts for itself: nobody is turned away for its sake, and nobody gets past the limits of one process.
Tokens are counted when a turn ends, in whatever way: the prompt once, and what every model wrote for it, whether or not
it was shown. A tenant that has spent its minute's is turned away until the next one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from limits import RateLimitItemPerMinute
from limits.aio.storage import MemoryStorage, RedisStorage
from limits.aio.strategies import FixedWindowRateLimiter

from gateway.errors import RateLimited
from gateway.settings import RegistrySettings
from gateway.tenants import Tenant

if TYPE_CHECKING:
    from limits.aio.storage import Storage

PREFIX = "kvrelay:quota"
REQUESTS, TOKENS = "requests", "tokens"
MINUTE_S = 60.0


class Quotas:
    def __init__(self, settings: RegistrySettings, on_op: Callable[[str, str], None]):
        self._own = Counted(MemoryStorage())
        self._shared: Counted | None = None
        self._spending: set[asyncio.Task[None]] = set()
        if urlsplit(settings.url).scheme != "memory":
            self._connect(settings.full_url, settings.timeout_ms / 1000, on_op)

    def _connect(self, url: str, timeout_s: float, on_op: Callable[[str, str], None]) -> None:
        from redis.asyncio import Redis  # which nobody else needs

        from gateway.registry.guard import Guard, pool_of

        self._pool = pool_of(url, timeout_s)
        storage = RedisStorage(
            f"async+{url}",
            implementation="redispy",
            key_prefix=PREFIX,
            connection_pool=self._pool,  # type: ignore[arg-type]
        )
        self._shared = Counted(storage)
        self._guard = Guard(Redis.from_pool(self._pool).ping, timeout_s=timeout_s, on_op=on_op)

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

    async def spent(self, tenant: Tenant, num_tokens: int) -> None:
        """What a turn has cost, however much was left. Counted even when the caller is cancelled meanwhile."""
        if tenant.tokens_per_minute is not None and num_tokens > 0:
            most = RateLimitItemPerMinute(tenant.tokens_per_minute)
            task = asyncio.create_task(self._spent(most, tenant, num_tokens))
            self._spending.add(task)
            task.add_done_callback(self._spending.discard)
            await asyncio.shield(task)

    async def _spent(self, most: RateLimitItemPerMinute, tenant: Tenant, num_tokens: int) -> None:
        await self._asked("quota_hit", lambda counted: counted.limiter.hit(most, TOKENS, tenant.name, cost=num_tokens))

    async def aclose(self) -> None:
        if self._spending:
            await asyncio.wait(self._spending)
        if self._shared is not None:
            await self._guard.aclose()
            await self._pool.aclose()

    async def _used_up(self, most: RateLimitItemPerMinute, what: str, tenant: Tenant) -> RateLimited:
        resets_at = await self._asked("quota_test", lambda counted: counted.resets_at(most, what, tenant.name))
        wait_s = min(max(1.0, float(resets_at) - time.time()), MINUTE_S)
        return RateLimited(f"more than {most.amount} {what} in a minute", retry_after_s=wait_s)

    async def _asked(self, op: str, ask: Callable[[Counted], Awaitable[float | bool]]) -> float | bool:
        shared = self._shared
        if shared is not None:
            answer = await self._guard.bounded(op, lambda: ask(shared))
            if answer is not None:
                return answer
        return await ask(self._own)


class Counted:
    """The counts of one store."""

    def __init__(self, storage: Storage):
        self.limiter = FixedWindowRateLimiter(storage)

    async def resets_at(self, most: RateLimitItemPerMinute, *identifiers: str) -> float:
        """In Unix seconds."""
        return float((await self.limiter.get_window_stats(most, *identifiers)).reset_time)
