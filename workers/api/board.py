"""Where heartbeats stand: a hash in a Redis, by worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

from redis.asyncio import Redis
from redis.exceptions import RedisError

from workers.api.heartbeat import Heartbeat
from workers.api.redis_pool import pool_of

__all__ = ["Board", "RedisError", "repeating"]

KEY = "kvrelay:workers"
TIMEOUT_S = 1.0


class Board:
    """The beats in one Redis. Raises `RedisError`."""

    def __init__(self, url: str, secret: str, timeout_s: float = TIMEOUT_S):
        self._redis = Redis.from_pool(pool_of(url, timeout_s))
        self._secret = secret

    async def put(self, beat: Heartbeat) -> None:
        await self._redis.hset(KEY, beat.worker, beat.signed(self._secret))

    async def remove(self, worker: str) -> None:
        await self._redis.hdel(KEY, worker)

    async def read(self) -> list[Heartbeat]:
        """Those that count. What a worker left there long ago is taken off: the board does not grow for ever."""
        raw = await self._redis.hgetall(KEY)
        ours = {name: beat for name, signed in raw.items() if (beat := Heartbeat.read(signed, self._secret))}
        old = [name for name, beat in ours.items() if beat.is_of_long_ago]
        if old:
            await self._redis.hdel(KEY, *old)
        return [beat for name, beat in ours.items() if name not in old]

    async def aclose(self) -> None:
        await self._redis.aclose()


@asynccontextmanager
async def repeating(work: Callable[[], Awaitable[None]], every_s: float) -> AsyncIterator[None]:
    """Within the block `work` is done again and again. At the end it is waited for, never cancelled: redis-py takes a
    cancellation for a failure of its own, and nobody would hear of it. It raises nothing."""
    ending = asyncio.Event()

    async def repeat() -> None:
        while not ending.is_set():
            await work()
            with suppress(TimeoutError):
                await asyncio.wait_for(ending.wait(), every_s)

    task = asyncio.create_task(repeat())
    try:
        yield
    finally:
        ending.set()
        await task
