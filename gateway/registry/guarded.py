"""`GuardedRedis`: the one Redis of a gateway, for all that it shares. Whoever finds it hanging finds it for all."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from redis.asyncio import Redis

from gateway.registry.guard import Guard, OnOp
from workers.api.redis_pool import pool_of

T = TypeVar("T")


class GuardedRedis:
    """`pool` and `client` are for calls within `bounded`; the outcome of each goes to `on_op(op, result)`."""

    def __init__(self, url: str, *, timeout_s: float, on_op: OnOp = lambda op, result: None):
        self.pool = pool_of(url, timeout_s)
        self.client = Redis.from_pool(self.pool)
        self.on_op = on_op
        self._guard = Guard(lambda: self.client.ping(), timeout_s=timeout_s, on_op=on_op)

    async def bounded(self, op: str, call: Callable[[], Awaitable[T]]) -> T | None:
        """The call's result; None where Redis failed, was late, or is not asked at all."""
        return await self._guard.bounded(op, call)

    async def aclose(self) -> None:
        await self._guard.aclose()
        await self.client.aclose()
