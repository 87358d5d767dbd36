"""`memory`: a bounded dictionary in this process, least recently used entries leave first."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

from gateway.registry.base import Entry, Registry


class MemoryRegistry(Registry):
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
