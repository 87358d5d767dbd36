"""Connections to a Redis, each of which waits for nothing longer than it is told."""

from __future__ import annotations

from typing import Any

from redis.asyncio import BlockingConnectionPool, ConnectionPool
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool
from redis.backoff import NoBackoff

from workers.api.config import SentinelUrl, is_sentinel

MAX_CONNECTIONS = 32


class MasterPool(SentinelConnectionPool, BlockingConnectionPool):
    """Connections to whichever server the sentinels call master, and to them."""

    async def aclose(self) -> None:
        await super().aclose()
        for sentinel in self.sentinel_manager.sentinels:
            await sentinel.aclose()


def pool_of(url: str, timeout_s: float) -> ConnectionPool:
    """For at most `MAX_CONNECTIONS` operations at once; one more waits for a connection."""
    waits: dict[str, Any] = {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s}
    bounds: dict[str, Any] = {"max_connections": MAX_CONNECTIONS, "timeout": timeout_s, "retry": Retry(NoBackoff(), 1)}
    if is_sentinel(url):
        return _master_pool(SentinelUrl.parse(url), waits, bounds)
    return BlockingConnectionPool.from_url(url, **bounds, **waits)


def _master_pool(url: SentinelUrl, waits: dict[str, Any], bounds: dict[str, Any]) -> MasterPool:
    tls = {"ssl": True} if url.tls else {}
    asking = waits | tls | {"retry": Retry(NoBackoff(), 0)}
    sentinels = Sentinel(list(url.sentinels), sentinel_kwargs=asking)  # type: ignore[no-untyped-call]
    known = {"db": url.database, "username": url.username, "password": url.password}
    return MasterPool(url.name, sentinels, **known, **bounds, **waits, **tls)  # type: ignore[no-untyped-call]
