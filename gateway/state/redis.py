"""The Redis that several gateways share: the registry in it, and the guard around every operation.

A Redis that hangs or is gone costs one operation's time, once. Every operation runs in a task of its own, which the
caller waits for but never cancels: a cancelled redis-py call can leave its answer on the connection for the next one to
read. The first failure opens the circuit; from then on operations return at once, and a background task looks whether
Redis is back, so that no request pays for the probe.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError
from redis.asyncio import Redis
from redis.exceptions import RedisError

from gateway.state.registry import Entry, Registry
from gateway.upstream.breaker import Breaker, BreakerSettings, State
from workers.api.redis import connection_pool

T = TypeVar("T")
OnOp = Callable[[str, str], None]

PROBE_S = 0.25
CIRCUIT = BreakerSettings(window=1, min_outcomes=1, failure_rate=1.0, open_s=1.0, num_probes=1, num_successes=2)

PREFIX = "kvrelay:prefix:"
WRITTEN = TypeAdapter(Entry)

# Deletes KEYS[1] only while the cache ARGV[1] stands there: another gateway may have filed a fresh one meanwhile.
FORGET = """
local value = redis.call('get', KEYS[1])
if value and cjson.decode(value).cache_id == ARGV[1] then return redis.call('del', KEYS[1]) end
return 0
"""


class Guard:
    """`ping` is what the probe does; the outcome of every operation goes to `on_op(op, result)`."""

    def __init__(self, ping: Callable[[], Awaitable[object]], *, timeout_s: float, on_op: OnOp):
        self._ping = ping
        self._timeout_s = timeout_s
        self._on_op = on_op
        self._breaker = Breaker("redis", CIRCUIT)
        self._tasks: set[asyncio.Task[object]] = set()
        self._probing: asyncio.Task[None] | None = None

    async def bounded(self, op: str, call: Callable[[], Awaitable[T]]) -> T | None:
        """The call's result; None where Redis failed, was late, or is not asked at all."""
        if not self._is_closed:
            self._on_op(op, "skipped")
            return None
        task = self._spawn(call)
        await asyncio.wait({task}, timeout=self._timeout_s)
        if task.done() and task.exception() is None:
            self._on_op(op, "ok")
            return task.result()
        self._failed(op, "error" if task.done() else "timeout")
        return None

    async def aclose(self) -> None:
        if self._probing is not None:
            self._probing.cancel()
        await asyncio.gather(*self._tasks, self._probing or asyncio.sleep(0), return_exceptions=True)

    @property
    def _is_closed(self) -> bool:
        """Requests go through a closed circuit only; a half-open one is the probe's."""
        return self._breaker.state is State.CLOSED

    def _spawn(self, call: Callable[[], Awaitable[T]]) -> asyncio.Task[T]:
        async def run() -> T:
            return await call()

        task = asyncio.create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[object]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # looked at, so that one whose caller went away is not reported as forgotten

    def _failed(self, op: str, result: str) -> None:
        self._on_op(op, result)
        if self._is_closed:
            self._breaker.begin().end(RedisError(result))
        if self._probing is None or self._probing.done():
            self._probing = asyncio.create_task(self._probe())

    async def _probe(self) -> None:
        """Pings until the circuit is closed again."""
        while not self._is_closed:
            await asyncio.sleep(PROBE_S)
            if self._breaker.admits:
                await self._try_once()

    async def _try_once(self) -> None:
        attempt = self._breaker.begin()
        try:
            await self._ping()
        except Exception as error:  # whatever it is: a probe that ends would leave the circuit open for ever
            attempt.end(error)
        else:
            attempt.end(None)


class GuardedRedis:
    """`pool` and `client` are for calls within `bounded`; the outcome of each goes to `on_op(op, result)`."""

    def __init__(self, url: str, *, timeout_s: float, on_op: OnOp = lambda op, result: None):
        self.pool = connection_pool(url, timeout_s)
        self.client = Redis.from_pool(self.pool)
        self.on_op = on_op
        self._guard = Guard(lambda: self.client.ping(), timeout_s=timeout_s, on_op=on_op)

    async def bounded(self, op: str, call: Callable[[], Awaitable[T]]) -> T | None:
        """The call's result; None where Redis failed, was late, or is not asked at all."""
        return await self._guard.bounded(op, call)

    async def aclose(self) -> None:
        await self._guard.aclose()
        await self.client.aclose()


class RedisRegistry(Registry):
    def __init__(self, redis: GuardedRedis, now: Callable[[], float] = time.time):
        self._redis = redis
        self._client = redis.client
        self._now = now

    @property
    def redis(self) -> GuardedRedis:
        return self._redis

    async def get_many(self, keys: Sequence[str]) -> list[Entry | None]:
        if not keys:
            return []
        found = await self._redis.bounded("get", lambda: self._client.mget([PREFIX + key for key in keys]))
        return [self._entry(raw) for raw in found] if found else [None] * len(keys)

    def _entry(self, raw: bytes | str | None) -> Entry | None:
        if raw is None:
            return None
        try:
            entry = WRITTEN.validate_json(raw)
        except ValidationError:
            self._redis.on_op("get", "unreadable")
            return None
        return entry if entry.expires_at > self._now() else None

    async def put_many(self, entries: Mapping[str, Entry]) -> None:
        lifetimes = {key: int((entry.expires_at - self._now()) * 1000) for key, entry in entries.items()}
        alive = {key: ms for key, ms in lifetimes.items() if ms > 0}
        if alive:
            await self._redis.bounded("put", lambda: self._put(entries, alive))

    async def _put(self, entries: Mapping[str, Entry], lifetimes_ms: Mapping[str, int]) -> None:
        async with self._client.pipeline(transaction=False) as pipeline:
            for key, lifetime_ms in lifetimes_ms.items():
                pipeline.set(PREFIX + key, WRITTEN.dump_json(entries[key]), px=lifetime_ms)
            await pipeline.execute()

    async def forget(self, key: str, entry: Entry) -> None:
        await self._redis.bounded("forget", lambda: self._client.eval(FORGET, 1, PREFIX + key, entry.cache_id))

    async def aclose(self) -> None:
        await self._redis.aclose()
