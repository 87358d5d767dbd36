"""Connection pools to a Redis, with bounded waits; also through sentinels, which know the current master."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

from pydantic_core import MultiHostUrl
from redis.asyncio import BlockingConnectionPool, ConnectionPool
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool
from redis.backoff import NoBackoff

from workers.api.config import sentinel_target

MAX_CONNECTIONS = 32
SENTINEL_PORT = 26_379


class MasterPool(SentinelConnectionPool, BlockingConnectionPool):
    """Connections to the server that the sentinels name as master, and to the sentinels."""

    async def aclose(self) -> None:
        await super().aclose()
        for sentinel in self.sentinel_manager.sentinels:
            await sentinel.aclose()


def connection_pool(url: str, timeout_s: float) -> ConnectionPool:
    """Return a pool of `MAX_CONNECTIONS`. `timeout_s` bounds each socket operation, and the wait for a connection."""
    timeouts: dict[str, Any] = {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s}
    bounds: dict[str, Any] = {"max_connections": MAX_CONNECTIONS, "timeout": timeout_s, "retry": Retry(NoBackoff(), 1)}
    target = sentinel_target(url)
    if target is None:
        return BlockingConnectionPool.from_url(url, **bounds, **timeouts)
    parsed = MultiHostUrl(url)
    hosts = parsed.hosts()
    tls = {"ssl": True} if parsed.scheme == "rediss+sentinel" else {}
    sentinels = Sentinel(  # type: ignore[no-untyped-call]
        [(str(host["host"]).strip("[]"), host["port"] or SENTINEL_PORT) for host in hosts],
        sentinel_kwargs=timeouts | tls | {"retry": Retry(NoBackoff(), 0)},
    )
    master, database = target
    credentials = {name: unquote(value) for name in ("username", "password") if (value := hosts[0][name])}
    return MasterPool(master, sentinels, db=database, **credentials, **bounds, **timeouts, **tls)  # type: ignore[no-untyped-call]
