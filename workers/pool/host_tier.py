"""`HostTier`: caches that a pool has evicted, in plain memory of the host, within a byte budget.

    pool    full: its least recently used caches are copied here, and evicted
    tier    full: its least recently used caches are gone for good
    hit     copied back into the pool, and gone here

Tables and memory only: it copies nothing and takes no lock; the pool's is held for every call but `clear`. A block is
known by its number and generation in the pool, under which its content never changes: two caches that shared it there
share its copy here.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from workers.api.schemas import KVLayout
from workers.pool.arena import num_blocks_in
from workers.pool.blocks import block_shape, torch_dtype
from workers.pool.entries import CacheEntry
from workers.pool.ledger import BlockLedger

Name = tuple[int, int]  # a block of the pool, and its generation


@dataclass(frozen=True)
class Kept:
    """A cache's copy: slot i holds its block i. `copies` are the (block, slot) pairs that were not here yet."""

    entry: CacheEntry
    slots: tuple[int, ...]
    copies: tuple[tuple[int, int], ...] = ()


class HostTier:
    """Raises `InvalidRequest` for a budget that holds no block."""

    def __init__(self, layout: KVLayout, budget_bytes: int):
        num_slots = num_blocks_in(budget_bytes, layout, "host_tier_bytes")
        self.data = torch.zeros((num_slots, *block_shape(layout)), dtype=torch_dtype(layout.dtype))
        self.num_slots = num_slots
        self._ledger = BlockLedger(num_slots)
        self._slot_of: dict[Name, int] = {}
        self._name_of: dict[int, Name] = {}
        self._kept: OrderedDict[str, Kept] = OrderedDict()  # least recently used first
        self._by_key: dict[bytes, list[str]] = {}
        self._busy: set[str] = set()  # being copied back
        self._next_expiry = math.inf

    @property
    def num_used(self) -> int:
        return self.num_slots - self._ledger.num_free

    @property
    def has_dirty(self) -> bool:
        return self._ledger.has_dirty

    def admit(self, entry: CacheEntry, generations: Sequence[int]) -> Kept | None:
        """Room for a cache, at the cost of those used least recently; None if there cannot be enough. The caller makes
        the copies of all that were admitted, in order, before it calls `commit` or `abandon` for each."""
        names = tuple(zip(entry.blocks, generations, strict=True))
        known = {name: self._slot_of[name] for name in names if name in self._slot_of}
        self._ledger.share(known.values())
        missing = [name for name in names if name not in known]
        if not self._make_room(len(missing)):
            self._give_back(list(known.values()))
            return None
        taken, _ = self._ledger.take(len(missing))
        slots = known | dict(zip(missing, taken, strict=True))
        for name, slot in zip(missing, taken, strict=True):
            self._slot_of[name], self._name_of[slot] = slot, name
        copies = tuple((block, slots[block, generation]) for block, generation in missing)
        return Kept(entry, tuple(slots[name] for name in names), copies)

    def commit(self, kept: Kept) -> None:
        """Its copies are made: it can be found."""
        for key in kept.entry.keys:
            self._by_key.setdefault(key, []).append(kept.entry.cache_id)
        self._kept[kept.entry.cache_id] = kept
        self._next_expiry = min(self._next_expiry, kept.entry.expires_at)

    def abandon(self, kept: Kept) -> None:
        self._give_back(kept.slots)

    def find(self, cache_id: str) -> CacheEntry | None:
        kept = self._kept.get(cache_id)
        return kept.entry if kept else None

    def longest(self, keys: Sequence[bytes]) -> tuple[str, int] | None:
        """The cache that shares the most of these chain hashes, and how many."""
        for num in range(len(keys), 0, -1):
            if keys[num - 1] in self._by_key:
                return self._by_key[keys[num - 1]][-1], num
        return None

    def begin_recall(self, cache_id: str) -> Kept | None:
        """The cache, whose slots stay as they are until `end_recall`; None if it is not here, or on its way already."""
        kept = self._kept.get(cache_id)
        if kept is None or cache_id in self._busy:
            return None
        self._busy.add(cache_id)
        self._ledger.share(kept.slots)
        return kept

    def end_recall(self, kept: Kept) -> None:
        self._busy.discard(kept.entry.cache_id)
        self._give_back(kept.slots)

    def forget(self, cache_id: str) -> CacheEntry | None:
        """The cache, which was here and is no more."""
        kept = self._kept.pop(cache_id, None)
        if kept is None:
            return None
        for key in kept.entry.keys:
            self._by_key[key].remove(cache_id)
            if not self._by_key[key]:
                del self._by_key[key]
        self._give_back(kept.slots)
        return kept.entry

    def expire(self, now: float) -> None:
        if now < self._next_expiry:
            return
        for entry in [entry for entry in self.entries() if entry.expires_at <= now]:
            self.forget(entry.cache_id)
        self._next_expiry = min((entry.expires_at for entry in self.entries()), default=math.inf)

    def entries(self) -> Iterator[CacheEntry]:
        return (kept.entry for kept in self._kept.values())

    def next_dirty(self, limit: int) -> list[int]:
        return self._ledger.next_dirty(limit)

    def clear(self, slots: Sequence[int]) -> None:
        """Zero slots of `next_dirty`; `cleaned` follows."""
        for slot in slots:
            self.data[slot].zero_()

    def cleaned(self, slots: Sequence[int]) -> None:
        self._ledger.cleaned(slots)

    def _make_room(self, num_slots: int) -> bool:
        while self._ledger.num_ready < num_slots:
            oldest = next((cache_id for cache_id in self._kept if cache_id not in self._busy), None)
            if oldest is None:
                return False
            self.forget(oldest)
        return True

    def _give_back(self, slots: Sequence[int]) -> None:
        for slot in self._ledger.drop(slots):
            name = self._name_of.pop(slot, None)
            if name is not None:
                del self._slot_of[name]
