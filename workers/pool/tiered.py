"""`HostTier`: caches that a pool has evicted, in plain memory of the host, within a byte budget.

    pool    full: its least recently used caches are copied here, and evicted
    tier    full: its least recently used caches are gone for good
    hit     copied back into the pool, and gone here

Tables and memory only: it copies nothing and takes no lock; the pool's is held for every call but `clear`. A block is
known by its number and generation in the pool, under which its content never changes: two caches that shared it there
share its copy here.

`TieredPool`: a pool whose evicted caches go to the host's memory first, and come back when they are asked for.

A cache in the second tier is not found by `get`, `hold`, `lease` or `match_prefix`, as its blocks are others' by now.
Who has a request asks `evicted` what should come back for it, and has `recall` copy it, off the event loop.
"""

from __future__ import annotations

import math
import secrets
import threading
from collections import OrderedDict
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from workers.api.errors import PoolFull
from workers.api.schemas import KVLayout, Provenance
from workers.pool.arena import Arena, num_blocks_in
from workers.pool.blocks import block_shape, torch_dtype
from workers.pool.entries import CacheEntry, Hold, PoolStats
from workers.pool.pool import CLEAR_BATCH, Pool, is_prefix
from workers.pool.tables import BlockLedger, choose_victims

BlockVersion = tuple[int, int]  # a block of the pool, and its generation


@dataclass(frozen=True)
class TierEntry:
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
        self._slot_of: dict[BlockVersion, int] = {}
        self._name_of: dict[int, BlockVersion] = {}
        self._kept: OrderedDict[str, TierEntry] = OrderedDict()  # least recently used first
        self._by_key: dict[bytes, list[str]] = {}
        self._busy: set[str] = set()  # being copied back
        self._next_expiry = math.inf

    @property
    def num_used(self) -> int:
        return self.num_slots - self._ledger.num_free

    @property
    def has_dirty(self) -> bool:
        return self._ledger.has_dirty

    def admit(self, entry: CacheEntry, generations: Sequence[int]) -> TierEntry | None:
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
        return TierEntry(entry, tuple(slots[name] for name in names), copies)

    def commit(self, kept: TierEntry) -> None:
        """Its copies are made: it can be found."""
        for key in kept.entry.keys:
            self._by_key.setdefault(key, []).append(kept.entry.cache_id)
        self._kept[kept.entry.cache_id] = kept
        self._next_expiry = min(self._next_expiry, kept.entry.expires_at)

    def abandon(self, kept: TierEntry) -> None:
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

    def begin_recall(self, cache_id: str) -> TierEntry | None:
        """The cache, whose slots stay as they are until `end_recall`; None if it is not here, or on its way already."""
        kept = self._kept.get(cache_id)
        if kept is None or cache_id in self._busy:
            return None
        self._busy.add(cache_id)
        self._ledger.share(kept.slots)
        return kept

    def end_recall(self, kept: TierEntry) -> None:
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


RECALL_BYTES = 2**23  # copied back in one step: a few milliseconds, for which others wait


class TieredPool(Pool):
    """With a second tier of `tier_bytes`. Raises `InvalidRequest` if that holds no block."""

    def __init__(self, arena: Arena, fingerprint: str, *, tier_bytes: int, **more: Any):
        self._tier = HostTier(arena.layout, tier_bytes)  # the base starts the thread that clears it
        self._spilling = threading.Lock()  # one copies down at a time
        self._num_recalls = 0
        self._recalled_at_once = max(1, RECALL_BYTES // arena.block_bytes)
        super().__init__(arena, fingerprint, **more)

    @property
    def stats(self) -> PoolStats:
        with self._changed:
            return replace(
                super().stats,
                tier_blocks=self._tier.num_slots,
                tier_used_blocks=self._tier.num_used,
                num_recalls=self._num_recalls,
            )

    def allocate(self, num_blocks: int, *, evict: bool = True, overwritten: int = 0) -> Hold:
        """As `Pool.allocate`; what it evicts is copied to the second tier before."""
        if evict:
            self._spill(num_blocks)
        return super().allocate(num_blocks, evict=evict, overwritten=overwritten)

    def discard(self, cache_id: str) -> None:
        with self._changed:
            if self._tier.forget(cache_id) is None:
                super().discard(cache_id)
            self._changed.notify_all()

    def discard_itself(self, cache_id: str) -> None:
        with self._changed:
            if self._tier.forget(cache_id) is None:
                super().discard_itself(cache_id)
            self._changed.notify_all()

    def supersede(self, exact: CacheEntry, *, tip: CacheEntry | None = None) -> int:
        """As `Pool.supersede`; those in the second tier go as well."""
        with self._changed:
            num_replaced = super().supersede(exact, tip=tip)
            below = [entry for entry in self._tier.entries() if not entry.is_exact and is_prefix(entry, exact)]
            for entry in below if num_replaced else ():
                self._tier.forget(entry.cache_id)
                self._successors[entry.cache_id] = exact.cache_id
            self._changed.notify_all()
            return num_replaced + (len(below) if num_replaced else 0)

    def evicted(self, token_ids: Sequence[int], salt: str, cache_id: str | None = None) -> str | None:
        keys = self._keys(token_ids, salt) if cache_id is None else []
        with self._changed:
            self._expire(self._clock())
            if cache_id is not None:
                entry = self._tier.find(cache_id)
                return cache_id if entry and secrets.compare_digest(entry.tenant_salt, salt) else None
            found = self._tier.longest(keys)
            return found[0] if found and found[1] > len(self._index.match(keys)) else None

    def recall(self, cache_id: str) -> Generator[None, None, None]:
        with self._changed:
            kept = self._tier.begin_recall(cache_id)
        if kept is None:
            return
        try:
            yield from self._copy_up(kept)
        except PoolFull:
            pass  # it stays where it is
        finally:
            with self._changed:
                self._tier.end_recall(kept)
                self._changed.notify_all()

    # -- down -------------------------------------------------------------------------------------------------------

    def _spill(self, num_blocks: int) -> None:
        """Copy down what so many blocks will cost, and evict it; what has no room there is left to `allocate`."""
        with self._spilling:
            with self._changed:
                going = self._admitted(num_blocks)
            is_copied = False
            try:
                for kept in going:
                    self._copy_down(kept)
                is_copied = True
            finally:
                with self._changed:
                    for kept in going:
                        self._settle(kept, is_copied)

    def _admitted(self, num_blocks: int) -> list[TierEntry]:
        """The victims that fit into the tier, their blocks held."""
        self._expire(self._clock())
        needed = num_blocks - self._ledger.num_free
        victims = choose_victims(self._entries.values(), self._ledger.users, needed) if needed > 0 else None
        admitted = (self._tier.admit(entry, self.arena.generations_of(entry.blocks)) for entry in victims or ())
        going = [kept for kept in admitted if kept]
        for kept in going:
            self._ledger.share(kept.entry.blocks)
        return going

    def _copy_down(self, kept: TierEntry) -> None:
        for block, slot in kept.copies:
            self._tier.data[slot].copy_(self.arena.data[block])

    def _settle(self, kept: TierEntry, is_copied: bool) -> None:
        """Evicted, unless it was dropped while it was copied."""
        if is_copied and self._entries.get(kept.entry.cache_id) is kept.entry:
            self._forget(kept.entry)
            self._num_evictions += 1
            self._tier.commit(kept)
        else:
            self._tier.abandon(kept)
        self._drop_users(kept.entry.blocks)

    # -- up ---------------------------------------------------------------------------------------------------------

    def _copy_up(self, kept: TierEntry) -> Iterator[None]:
        """What of an exact cache stands in the pool is shared, the rest copied."""
        entry = kept.entry
        token_ids = entry.token_ids if entry.is_exact else ()
        with (
            self.match_prefix(token_ids, entry.tenant_salt) as prefix,
            self.allocate(needed := len(kept.slots) - len(prefix.blocks), overwritten=needed) as fresh,
        ):
            with self.arena.writing(fresh.blocks):
                pairs = list(zip(fresh.blocks, kept.slots[len(prefix.blocks) :], strict=True))
                for at in range(0, len(pairs), self._recalled_at_once):
                    for block, slot in pairs[at : at + self._recalled_at_once]:
                        self.arena.data[block].copy_(self._tier.data[slot])
                    yield
            self._stand_again(kept, prefix.blocks + fresh.blocks)

    def _stand_again(self, kept: TierEntry, blocks: tuple[int, ...]) -> None:
        """Under its old id, unless it was dropped or expired meanwhile."""
        with self._changed:
            self._expire(self._clock())
            entry = self._tier.forget(kept.entry.cache_id)
            if entry is None:
                return
            entry = replace(entry, blocks=blocks)
            self._ledger.share(blocks)
            self._entries[entry.cache_id] = entry
            self._index.add(entry.keys, blocks, entry.cache_id)
            self._next_expiry = min(self._next_expiry, entry.expires_at)
            self._num_recalls += 1

    # -- inside -----------------------------------------------------------------------------------------------------

    def _forget_made_by(self, provenance: Provenance) -> None:
        super()._forget_made_by(provenance)
        for entry in [entry for entry in self._tier.entries() if entry.provenance == provenance]:
            self._tier.forget(entry.cache_id)
        self._changed.notify_all()

    def _expire(self, now: float) -> None:
        super()._expire(now)
        self._tier.expire(now)

    def _clear_for_ever(self) -> None:
        """The blocks of both tiers, as they come free."""
        while not self._closed:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._ledger.has_dirty or self._tier.has_dirty)
                blocks, slots = self._ledger.next_dirty(CLEAR_BATCH), self._tier.next_dirty(CLEAR_BATCH)
            self.arena.clear(blocks)
            self._tier.clear(slots)
            with self._changed:
                self._ledger.cleaned(blocks)
                self._tier.cleaned(slots)
                self._changed.notify_all()
