"""`TieredPool`: a pool that evicts caches to host memory, and brings them back on request. `HostTier`: that memory.

    pool    full: its least recently used caches are copied to the tier, and evicted
    tier    full: its least recently used caches are dropped
    hit     copied back into the pool, and removed from the tier

A cache in the second tier is not found by `get`, `hold`, `lease` or `match_prefix`: its blocks have other content now.
A request asks `find_evicted` which cache to bring back, and lets `recall` copy it off the event loop.
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

RECALL_BYTES = 2**23  # copied back in one step: others wait for it a few milliseconds

BlockVersion = tuple[int, int]  # a block of the pool, and its generation


@dataclass(frozen=True)
class TierEntry:
    """A cache's copy: slot i holds its block i. `copies` are the (block, slot) pairs that were not in the tier yet."""

    entry: CacheEntry
    slots: tuple[int, ...]
    copies: tuple[tuple[int, int], ...] = ()


class HostTier:
    """Caches in plain host memory within a byte budget. Raises `InvalidRequest` if the budget holds no block.

    It has tables and memory only: it copies nothing and takes no lock. The pool's lock is held for every call but
    `clear`. A block is identified by its number and generation in the pool, which fix its content: two caches that
    share a block there share its copy here.
    """

    def __init__(self, layout: KVLayout, budget_bytes: int):
        num_slots = num_blocks_in(budget_bytes, layout, "host_tier_bytes")
        self.data = torch.zeros((num_slots, *block_shape(layout)), dtype=torch_dtype(layout.dtype))
        self.num_slots = num_slots
        self.ledger = BlockLedger(num_slots)
        self._slot_of: dict[BlockVersion, int] = {}
        self._version_in: dict[int, BlockVersion] = {}
        self._entries: OrderedDict[str, TierEntry] = OrderedDict()  # least recently used first
        self._by_key: dict[bytes, list[str]] = {}
        self._busy: set[str] = set()  # being copied back
        self._next_expiry = math.inf

    @property
    def num_used(self) -> int:
        return self.num_slots - self.ledger.num_free

    def admit(self, entry: CacheEntry, generations: Sequence[int]) -> TierEntry | None:
        """Make room for a cache by dropping the least recently used ones. Returns None if that is impossible.

        The caller makes the copies of all admitted caches, in order, before it calls `commit` or `abandon` for each.
        """
        versions = tuple(zip(entry.blocks, generations, strict=True))
        known = {version: self._slot_of[version] for version in versions if version in self._slot_of}
        self.ledger.share(known.values())
        missing = [version for version in versions if version not in known]
        if not self._make_room(len(missing)):
            self._give_back(list(known.values()))
            return None
        taken, _ = self.ledger.take(len(missing))
        slots = known | dict(zip(missing, taken, strict=True))
        for version, slot in zip(missing, taken, strict=True):
            self._slot_of[version], self._version_in[slot] = slot, version
        copies = tuple((block, slots[block, generation]) for block, generation in missing)
        return TierEntry(entry, tuple(slots[version] for version in versions), copies)

    def commit(self, tier_entry: TierEntry) -> None:
        """List a cache whose copies are made."""
        entry = tier_entry.entry
        for key in entry.keys:
            self._by_key.setdefault(key, []).append(entry.cache_id)
        self._entries[entry.cache_id] = tier_entry
        self._next_expiry = min(self._next_expiry, entry.expires_at)

    def abandon(self, tier_entry: TierEntry) -> None:
        self._give_back(tier_entry.slots)

    def find(self, cache_id: str) -> CacheEntry | None:
        found = self._entries.get(cache_id)
        return found.entry if found else None

    def longest(self, keys: Sequence[bytes]) -> tuple[str, int] | None:
        """Return the cache that shares the most of these chain hashes, and how many."""
        for num in range(len(keys), 0, -1):
            if keys[num - 1] in self._by_key:
                return self._by_key[keys[num - 1]][-1], num
        return None

    def begin_recall(self, cache_id: str) -> TierEntry | None:
        """Hold the cache's slots until `end_recall`. Returns None if it is absent or already being recalled."""
        found = self._entries.get(cache_id)
        if found is None or cache_id in self._busy:
            return None
        self._busy.add(cache_id)
        self.ledger.share(found.slots)
        return found

    def end_recall(self, tier_entry: TierEntry) -> None:
        self._busy.discard(tier_entry.entry.cache_id)
        self._give_back(tier_entry.slots)

    def forget(self, cache_id: str) -> CacheEntry | None:
        """Remove a cache and return it; None if it is absent."""
        found = self._entries.pop(cache_id, None)
        if found is None:
            return None
        for key in found.entry.keys:
            self._by_key[key].remove(cache_id)
            if not self._by_key[key]:
                del self._by_key[key]
        self._give_back(found.slots)
        return found.entry

    def expire(self, now: float) -> None:
        if now < self._next_expiry:
            return
        for entry in [entry for entry in self.entries() if entry.expires_at <= now]:
            self.forget(entry.cache_id)
        self._next_expiry = min((entry.expires_at for entry in self.entries()), default=math.inf)

    def entries(self) -> Iterator[CacheEntry]:
        return (tier_entry.entry for tier_entry in self._entries.values())

    def clear(self, slots: Sequence[int]) -> None:
        """Zero slots of `ledger.next_dirty`; `ledger.cleaned` follows."""
        for slot in slots:
            self.data[slot].zero_()

    def _make_room(self, num_slots: int) -> bool:
        while self.ledger.num_ready < num_slots:
            oldest = next((cache_id for cache_id in self._entries if cache_id not in self._busy), None)
            if oldest is None:
                return False
            self.forget(oldest)
        return True

    def _give_back(self, slots: Sequence[int]) -> None:
        for slot in self.ledger.drop(slots):
            version = self._version_in.pop(slot, None)
            if version is not None:
                del self._slot_of[version]


class TieredPool(Pool):
    """A pool with a second tier of `tier_bytes`. Raises `InvalidRequest` if that holds no block."""

    def __init__(self, arena: Arena, fingerprint: str, *, tier_bytes: int, **options: Any):
        self._tier = HostTier(arena.layout, tier_bytes)  # before the base starts the thread that clears it
        self._spill_lock = threading.Lock()  # one spill at a time
        self._num_recalls = 0
        self._blocks_per_step = max(1, RECALL_BYTES // arena.block_bytes)
        super().__init__(arena, fingerprint, **options)

    @property
    def stats(self) -> PoolStats:
        with self._changed:
            return replace(
                super().stats,
                tier_blocks=self._tier.num_slots,
                tier_used_blocks=self._tier.num_used,
                num_recalls=self._num_recalls,
            )

    def allocate(self, num_blocks: int, *, evict: bool = True, num_overwritten: int = 0) -> Hold:
        """As `Pool.allocate`, but copy the evicted caches to the second tier first."""
        if evict:
            self._spill(num_blocks)
        return super().allocate(num_blocks, evict=evict, num_overwritten=num_overwritten)

    def discard(self, cache_id: str) -> None:
        with self._changed:
            if self._tier.forget(cache_id) is None:
                super().discard(cache_id)
            self._changed.notify_all()

    def discard_if_present(self, cache_id: str) -> None:
        with self._changed:
            if self._tier.forget(cache_id) is None:
                super().discard_if_present(cache_id)
            self._changed.notify_all()

    def supersede(self, exact: CacheEntry, *, tip: CacheEntry | None = None) -> int:
        """As `Pool.supersede`, for the caches of both tiers."""
        with self._changed:
            num_replaced = super().supersede(exact, tip=tip)
            if not num_replaced:
                return 0
            in_tier = [entry for entry in self._tier.entries() if not entry.is_exact and is_prefix(entry, exact)]
            for entry in in_tier:
                self._tier.forget(entry.cache_id)
                self._successors[entry.cache_id] = exact.cache_id
            self._changed.notify_all()
            return num_replaced + len(in_tier)

    def find_evicted(self, token_ids: Sequence[int], salt: str, cache_id: str | None = None) -> str | None:
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
            tier_entry = self._tier.begin_recall(cache_id)
        if tier_entry is None:
            return
        try:
            yield from self._copy_up(tier_entry)
        except PoolFull:
            pass  # it stays in the tier
        finally:
            with self._changed:
                self._tier.end_recall(tier_entry)
                self._changed.notify_all()

    # -- down -------------------------------------------------------------------------------------------------------

    def _spill(self, num_blocks: int) -> None:
        """Copy to the tier, and evict, the caches whose eviction frees `num_blocks`. `allocate` evicts those that do
        not fit into the tier."""
        with self._spill_lock:
            with self._changed:
                admitted = self._admit_victims(num_blocks)
            is_copied = False
            try:
                for tier_entry in admitted:
                    for block, slot in tier_entry.copies:
                        self._tier.data[slot].copy_(self.arena.data[block])
                is_copied = True
            finally:
                with self._changed:
                    for tier_entry in admitted:
                        self._finish_spill(tier_entry, is_copied)

    def _admit_victims(self, num_blocks: int) -> list[TierEntry]:
        """Choose the victims that fit into the tier, and hold their blocks."""
        self._expire(self._clock())
        needed = num_blocks - self._ledger.num_free
        victims = choose_victims(self._entries.values(), self._ledger.users, needed) if needed > 0 else None
        tried = [self._tier.admit(entry, self.arena.generations_of(entry.blocks)) for entry in victims or ()]
        admitted = [tier_entry for tier_entry in tried if tier_entry]
        for tier_entry in admitted:
            self._ledger.share(tier_entry.entry.blocks)
        return admitted

    def _finish_spill(self, tier_entry: TierEntry, is_copied: bool) -> None:
        """Evict the cache, unless it was dropped while it was copied."""
        entry = tier_entry.entry
        if is_copied and self._entries.get(entry.cache_id) is entry:
            self._forget(entry)
            self._num_evictions += 1
            self._tier.commit(tier_entry)
        else:
            self._tier.abandon(tier_entry)
        self._drop_users(entry.blocks)

    # -- up ---------------------------------------------------------------------------------------------------------

    def _copy_up(self, tier_entry: TierEntry) -> Iterator[None]:
        """Share the blocks of an exact cache that are still in the pool, and copy the others."""
        entry = tier_entry.entry
        token_ids = entry.token_ids if entry.is_exact else ()
        with (
            self.match_prefix(token_ids, entry.tenant_salt) as prefix,
            self.allocate(needed := len(tier_entry.slots) - len(prefix.blocks), num_overwritten=needed) as fresh,
        ):
            with self.arena.writing(fresh.blocks):
                pairs = list(zip(fresh.blocks, tier_entry.slots[len(prefix.blocks) :], strict=True))
                for at in range(0, len(pairs), self._blocks_per_step):
                    for block, slot in pairs[at : at + self._blocks_per_step]:
                        self.arena.data[block].copy_(self._tier.data[slot])
                    yield
            with self._changed:
                self._expire(self._clock())
                if self._tier.forget(entry.cache_id) is None:
                    return  # dropped or expired meanwhile
                restored = replace(entry, blocks=prefix.blocks + fresh.blocks)  # under its old id
                self._ledger.share(restored.blocks)
                self._add(restored)
                self._num_recalls += 1

    # -- inside -----------------------------------------------------------------------------------------------------

    def _forget_provenance(self, provenance: Provenance) -> None:
        super()._forget_provenance(provenance)
        for entry in [entry for entry in self._tier.entries() if entry.provenance == provenance]:
            self._tier.forget(entry.cache_id)
        self._changed.notify_all()

    def _expire(self, now: float) -> None:
        super()._expire(now)
        self._tier.expire(now)

    def _clear_freed_blocks(self) -> None:
        tier = self._tier
        while not self._closed:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._ledger.has_dirty or tier.ledger.has_dirty)
                blocks, slots = self._ledger.next_dirty(CLEAR_BATCH), tier.ledger.next_dirty(CLEAR_BATCH)
            self.arena.clear(blocks)
            tier.clear(slots)
            with self._changed:
                self._ledger.cleaned(blocks)
                tier.ledger.cleaned(slots)
                self._changed.notify_all()
