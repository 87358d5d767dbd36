"""Where prefixes are remembered: chain hash -> the cache that a worker holds of it.

What stands here is a hint. A loss is a miss, a stale entry is noticed by its epoch or refused by the worker; no
operation raises, and none costs a request more than its configured time.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from gateway.settings import RegistrySettings
from workers.api.schemas import CacheId, Digest, Provenance

if TYPE_CHECKING:
    from gateway.state.redis import GuardedRedis


@dataclass(frozen=True)
class Entry:
    """One cache of one prefix. `num_tokens` counts the tokens of the messages that it is filed under. Who reads one
    from elsewhere checks it."""

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
    """Every method returns within the configured time, whatever happens; the outcome goes to `on_op(op, result)`."""

    @property
    def redis(self) -> GuardedRedis | None:
        """Where it is shared, for what else the gateways share; None in this process."""
        return None

    @abstractmethod
    async def get_many(self, keys: Sequence[str]) -> list[Entry | None]:
        """The entries, in the order of `keys`; None for what is absent, expired or unreadable."""

    @abstractmethod
    async def put_many(self, entries: Mapping[str, Entry]) -> None:
        """Files the entries until each expires. An entry that is already there is replaced."""

    @abstractmethod
    async def forget(self, key: str, entry: Entry) -> None:
        """Deletes the entry, unless another cache stands under `key` by now."""

    @abstractmethod
    async def aclose(self) -> None: ...


class MemoryRegistry(Registry):
    """A bounded dictionary in this process; least recently used entries leave first."""

    def __init__(
        self,
        max_entries: int,
        *,
        now: Callable[[], float] = time.time,
        on_op: Callable[[str, str], None] = lambda op, result: None,
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


def connect(settings: RegistrySettings, on_op: Callable[[str, str], None]) -> Registry:
    """The registry that `settings.url` names. Connects lazily: a Redis that is down does not stop the start."""
    if not settings.is_shared:
        return MemoryRegistry(settings.max_entries, on_op=on_op)
    from gateway.state.redis import GuardedRedis, RedisRegistry  # imports redis, which the embedded default never needs

    return RedisRegistry(GuardedRedis(settings.full_url, timeout_s=settings.timeout_ms / 1000, on_op=on_op))
