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
MAX_COMPARED_TOKENS = 2**19  # a few hundredths of a second


class Made:
    """For use on one event loop. Remembers ids only; the pool evicts as it likes."""

    def __init__(self, pool: Pool, *, max_compared_tokens: int = MAX_COMPARED_TOKENS):
        self._pool = pool
        self._max_compared_tokens = max_compared_tokens
        self._ids: OrderedDict[str, None] = OrderedDict()

    def note(self, entry: CacheEntry) -> None:
        self._ids[entry.cache_id] = None
        if len(self._ids) > MAX_KNOWN:
            self._ids.popitem(last=False)

    def longest(self, plan: Plan, salt: str) -> tuple[Hold, int]:
        """The cache that shares the most mapped tokens with the plan, held, and how many, head and all. An empty hold
        if none does."""
        best, shared = self._best(plan, salt)
        try:
            if best and shared:
                return self._pool.hold(best.cache_id, salt), shared
        except CacheNotFound:
            pass  # another thread made room meanwhile
        return Hold((), 0, lambda blocks: None), 0

    def _best(self, plan: Plan, salt: str) -> tuple[CacheEntry | None, int]:
        """The one that shares most, and how many tokens. Those that can share most are compared first, until none that
        is left can share more: this runs on the event loop."""
        token_ids, best, most, left = plan.token_ids, None, 0, self._max_compared_tokens
        known = [entry for entry in map(self._entry, list(self._ids)) if entry and _is_alike(entry, plan, salt)]
        for entry in sorted(known, key=lambda entry: self._at_most(entry, plan), reverse=True):
            if self._at_most(entry, plan) <= most or left <= 0:
                break
            common = entry.common_prefix(token_ids)
            left -= common
            if (shared := min(self._whole_blocks(common), self._at_most(entry, plan))) > most:
                best, most = entry, shared
        return (best, most) if most > plan.head else (None, 0)

    def _at_most(self, entry: CacheEntry, plan: Plan) -> int:
        """How many tokens they share if none differs."""
        return self._whole_blocks(min(entry.mapped.end if entry.mapped else 0, plan.num_tokens))

    def _whole_blocks(self, num_tokens: int) -> int:
        return num_tokens - num_tokens % self._pool.layout.block_tokens

    def _entry(self, cache_id: str) -> CacheEntry | None:
        try:
            return self._pool.peek(cache_id)
        except CacheNotFound:
            del self._ids[cache_id]
            return None


def _is_alike(entry: CacheEntry, plan: Plan, salt: str) -> bool:
    """Whether its tokens, as far as they are the plan's, stand there as the plan would make them."""
    same = (entry.tenant_salt, entry.provenance) == (salt, plan.provenance)
    return same and entry.mapped is not None and entry.mapped.begin == plan.head
