"""`redis`: shared by several gateways. What a Redis that hangs or is gone costs is the guard's business."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from pydantic import TypeAdapter, ValidationError

from gateway.registry.base import Entry, Registry
from gateway.registry.guarded import GuardedRedis

PREFIX = "kvrelay:prefix:"
WRITTEN = TypeAdapter(Entry)

# Deletes KEYS[1] only while the cache ARGV[1] stands there: another gateway may have filed a fresh one meanwhile.
FORGET = """
local value = redis.call('get', KEYS[1])
if value and cjson.decode(value).cache_id == ARGV[1] then return redis.call('del', KEYS[1]) end
return 0
"""


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
