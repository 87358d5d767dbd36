"""The registry: a map from the chain hash of a prefix to the cache that a worker holds of it.

Entries are hints. A lost entry is a miss; a stale one is detected by its epoch or rejected by the worker. No operation
raises, and none takes longer than its configured time.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, TypeAdapter, ValidationError

from gateway.settings import RegistrySettings
from workers.api.schemas import CacheId, Digest, Provenance

if TYPE_CHECKING:
    from gateway.state.redis import SharedRedis

OnOp = Callable[[str, str], None]


@dataclass(frozen=True)
class Entry:
    """One cache of one prefix. `num_tokens` counts the tokens of the messages that it is registered for."""

    cache_id: CacheId
    worker: str
    epoch: str
    tenant: str
    num_tokens: Annotated[int, Field(ge=0)]
    provenance: Provenance
    expires_at: float
    digest: Digest | None = None

    @property
    def is_exact(self) -> bool:
        return self.provenance == "exact"


class Registry(ABC):
    """No method raises or exceeds the configured time. The outcome of each operation goes to `on_op(op, result)`."""

    @property
    def redis(self) -> SharedRedis | None:
        """The Redis behind a shared registry, for the gateways' other shared state; None in this process."""
        return None

    @abstractmethod
    async def get_many(self, keys: Sequence[str]) -> list[Entry | None]:
        """Return the entries in the order of `keys`; None if absent, expired or unreadable."""

    @abstractmethod
    async def put_many(self, entries: Mapping[str, Entry]) -> None:
        """Store the entries until each expires, replacing earlier ones."""

    @abstractmethod
    async def forget(self, key: str, entry: Entry) -> None:
        """Delete the entry, unless `key` holds another cache by now."""

    @abstractmethod
    async def aclose(self) -> None: ...


def connect(settings: RegistrySettings, on_op: OnOp) -> Registry:
    """Return the registry of `settings.url`. Connects on first use: a Redis that is down does not stop the start."""
    if not settings.is_shared:
        return MemoryRegistry(settings.max_entries, on_op=on_op)
    from gateway.state.redis import SharedRedis  # imports redis, which the in-process default does not need

    return RedisRegistry(SharedRedis(settings.full_url, timeout_s=settings.timeout_ms / 1000, on_op=on_op))


class MemoryRegistry(Registry):
    """A bounded dictionary in this process. Evicts the least recently used entry."""

    def __init__(
        self, max_entries: int, *, now: Callable[[], float] = time.time, on_op: OnOp = lambda op, result: None
    ):
        self._max_entries = max_entries
        self._now = now
        self._on_op = on_op
        self._entries: OrderedDict[str, Entry] = OrderedDict()

    async def get_many(self, keys: Sequence[str]) -> list[Entry | None]:
        self._on_op("get", "ok")
        return [self._get(key) for key in keys]

    def _get(self, key: str) -> Entry | None:
        entry = self._entries.get(key)
        if entry is None:
            return None
        if entry.expires_at <= self._now():
            del self._entries[key]
            return None
        self._entries.move_to_end(key)
        return entry

    async def put_many(self, entries: Mapping[str, Entry]) -> None:
        self._on_op("put", "ok")
        for key, entry in entries.items():
            self._entries[key] = entry
            self._entries.move_to_end(key)
        while len(self._entries) > self._max_entries:
            self._entries.popitem(last=False)

    async def forget(self, key: str, entry: Entry) -> None:
        self._on_op("forget", "ok")
        found = self._entries.get(key)
        if found is not None and found.cache_id == entry.cache_id:
            del self._entries[key]

    async def aclose(self) -> None:
        self._entries.clear()


KEY_PREFIX = "kvrelay:prefix:"
ENTRY = TypeAdapter(Entry)

# Delete KEYS[1] only while it holds the cache ARGV[1]: another gateway may have stored a newer one.
FORGET = """
local value = redis.call('get', KEYS[1])
if value and cjson.decode(value).cache_id == ARGV[1] then return redis.call('del', KEYS[1]) end
return 0
"""


class RedisRegistry(Registry):
    """Entries as JSON in a Redis that several gateways share."""

    def __init__(self, redis: SharedRedis, now: Callable[[], float] = time.time):
        self._redis = redis
        self._client = redis.client
        self._now = now

    @property
    def redis(self) -> SharedRedis:
        return self._redis

    async def get_many(self, keys: Sequence[str]) -> list[Entry | None]:
        if not keys:
            return []
        found = await self._redis.run("get", lambda: self._client.mget([KEY_PREFIX + key for key in keys]))
        return [self._parse(raw) for raw in found] if found else [None] * len(keys)

    def _parse(self, raw: bytes | str | None) -> Entry | None:
        if raw is None:
            return None
        try:
            entry = ENTRY.validate_json(raw)
        except ValidationError:
            self._redis.on_op("get", "unreadable")
            return None
        return entry if entry.expires_at > self._now() else None

    async def put_many(self, entries: Mapping[str, Entry]) -> None:
        lifetimes_ms = {key: int((entry.expires_at - self._now()) * 1000) for key, entry in entries.items()}

        async def put() -> None:
            async with self._client.pipeline(transaction=False) as pipeline:
                for key, lifetime_ms in lifetimes_ms.items():
                    if lifetime_ms > 0:
                        pipeline.set(KEY_PREFIX + key, ENTRY.dump_json(entries[key]), px=lifetime_ms)
                await pipeline.execute()

        if any(lifetime_ms > 0 for lifetime_ms in lifetimes_ms.values()):
            await self._redis.run("put", put)

    async def forget(self, key: str, entry: Entry) -> None:
        await self._redis.run("forget", lambda: self._client.eval(FORGET, 1, KEY_PREFIX + key, entry.cache_id))

    async def aclose(self) -> None:
        await self._redis.aclose()
