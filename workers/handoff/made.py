"""`Made`: the caches that handoffs have left in this pool, so that one that goes further begins where the last ended.

    earlier     |head|◄──── mapped ────►|◄ native ►
    now         |head|◄──────────── to map ────────────►|
                |◄─ whole blocks, shared ─►|◄── mapped ──►|

A conversation that goes on is handed over again with the same beginning. What was mapped then is what the same bundle
would make of the same tokens now. Such a cache is found by its id, which the handoff that made it left here, and never
by its tokens alone; those are compared as well.
"""

from __future__ import annotations

from collections import OrderedDict

from workers.api.errors import CacheNotFound
from workers.handoff.plan import Plan
from workers.pool.entries import CacheEntry, Hold
from workers.pool.pool import Pool

MAX_KNOWN = 256


class Made:
    """For use on one event loop. Remembers ids only; the pool evicts as it likes."""

    def __init__(self, pool: Pool):
        self._pool = pool
        self._ids: OrderedDict[str, None] = OrderedDict()

    def note(self, entry: CacheEntry) -> None:
        self._ids[entry.cache_id] = None
        if len(self._ids) > MAX_KNOWN:
            self._ids.popitem(last=False)

    def longest(self, plan: Plan, salt: str) -> tuple[Hold, int]:
        """The cache that shares the most mapped tokens with the plan, held, and how many, head and all. An empty hold
        if none does."""
        known = [entry for entry in map(self._entry, list(self._ids)) if entry is not None]
        best = max(known, key=lambda entry: self._shared_tokens(entry, plan, salt), default=None)
        shared = self._shared_tokens(best, plan, salt) if best else 0
        try:
            if best and shared:
                return self._pool.hold(best.cache_id, salt), shared
        except CacheNotFound:
            pass  # another thread made room meanwhile
        return Hold((), 0, lambda blocks: None), 0

    def _shared_tokens(self, entry: CacheEntry, plan: Plan, salt: str) -> int:
        """How many first tokens of the plan this cache holds as the plan would make them, in whole blocks."""
        if (entry.tenant_salt, entry.provenance) != (salt, plan.provenance):
            return 0
        if entry.mapped is None or entry.mapped.begin != plan.head:
            return 0
        size = self._pool.layout.block_tokens
        shared = min(entry.common_prefix(plan.token_ids), entry.mapped.end) // size * size
        return shared if shared > plan.head else 0

    def _entry(self, cache_id: str) -> CacheEntry | None:
        try:
            return self._pool.peek(cache_id)
        except CacheNotFound:
            del self._ids[cache_id]
            return None
