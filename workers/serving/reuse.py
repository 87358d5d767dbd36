"""How much of a prompt is in the pool already, and KV between the pool and a sequence's working memory.

    prompt    |◄──────── num_tokens from the pool ──────────►|◄── native prefill, at least one ──►|
    mapped    | head |◄── mapped_tokens ──►|  native over it |

With a cache id, that cache is used and no other, up to its common token prefix with this very prompt. Without one, the
longest exact prefix is found by its tokens. A mapped cache, or one computed over a mapped cache, is never found that
way. Fewer than `MIN_LOADED_TOKENS` tokens are not used.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from mappers.cache import KVCache
from workers.api.errors import CacheMismatch, Overloaded
from workers.api.schemas import KVTransferParams, Path
from workers.engines.base import MIN_LOADED_TOKENS, Engine, PoolLocation, TokenSequence
from workers.engines.scheduling import Admission, Claim
from workers.pool.blocks import blocks_for
from workers.pool.entries import EXACT, CacheEntry, Hold
from workers.pool.pool import Pool

MAX_RECALL_S = 2.0  # the caller's prompt can be prefilled instead
MAX_RECALL_SHARE = 0.25  # of a request's remaining time
_END = object()


@dataclass(frozen=True)
class Reuse:
    """The first `num_tokens` of a prompt, in the blocks of `hold`; None if nothing can be used."""

    hold: Hold | None = None
    num_tokens: int = 0

    @property
    def provenance(self) -> str:
        entry = self.hold.entry if self.hold else None
        return entry.provenance if entry else EXACT

    @property
    def cached_tokens(self) -> int:
        """Exact hits."""
        return self.num_tokens if self.provenance == EXACT else 0

    @property
    def mapped_tokens(self) -> int:
        """Tokens whose KV came from a mapper."""
        entry = self.hold.entry if self.hold else None
        if entry is None or entry.mapped is None:
            return 0
        return max(0, min(self.num_tokens, entry.mapped.end) - entry.mapped.begin)

    @property
    def path(self) -> Path:
        if not self.num_tokens:
            return "prefill"
        entry = self.hold.entry if self.hold else None
        if entry is None or entry.is_exact:
            return "exact"
        return "hybrid" if entry.is_hybrid else "mapped"

    def limited(self, num_tokens: int) -> Reuse:
        """Return the reuse if at most `num_tokens` tokens were loaded."""
        return self if num_tokens >= self.num_tokens else _reuse(self.hold, num_tokens)


@contextmanager
def find_reuse(pool: Pool, token_ids: Sequence[int], salt: str, params: KVTransferParams) -> Iterator[Reuse]:
    """Yield what can be reused for a prompt, and hold its blocks inside the block. At least one token is left to
    prefill. Raises `CacheNotFound` and `CacheMismatch` if a named cache cannot be used for this prompt."""
    limit = min(len(token_ids) - 1, params.num_tokens or len(token_ids))
    if params.cache_id is not None:
        with pool.hold(params.cache_id, salt, require_exact=params.require_exact) as hold:
            entry = hold.entry
            assert entry is not None, "a hold by cache id has its cache"
            common = entry.common_prefix(token_ids)
            if common == 0:
                raise CacheMismatch(f"{entry.cache_id} and this prompt differ in their first token", param="cache_id")
            yield _reuse(hold, min(common, limit))
    elif params.reuse:
        with pool.match_prefix(token_ids[:limit], salt) as hold:
            yield _reuse(hold, hold.num_tokens)
    else:
        yield Reuse()


def _reuse(hold: Hold | None, num_tokens: int) -> Reuse:
    return Reuse(hold, num_tokens) if num_tokens >= MIN_LOADED_TOKENS else Reuse()


# -- between pool and sequence ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PooledKV:
    """The first tokens of a sequence in held blocks, as an engine's `KVSource`."""

    pool: Pool
    blocks: tuple[int, ...]
    num_tokens: int

    def __call__(self, views: KVCache) -> object:
        return self.pool.gather(self.blocks, 0, self.num_tokens, views)

    @property
    def location(self) -> PoolLocation:
        used = self.blocks[: blocks_for(self.num_tokens, self.pool.layout.block_tokens)]
        generations = tuple(self.pool.arena.generations_of(used))
        return PoolLocation(self.pool.export(), self.pool.layout, used, generations)


async def page_in(pool: Pool, sequence: TokenSequence, token_ids: Sequence[int], reuse: Reuse) -> Reuse:
    """Fill an empty sequence with a prompt: load what is reused, prefill the rest. Returns what was really reused,
    which is less if the engine could not load all of it."""
    await load_reused(pool, sequence, token_ids, reuse)
    await sequence.prefill(token_ids[reuse.num_tokens :])
    return reuse.limited(sequence.num_loaded)


async def load_reused(pool: Pool, sequence: TokenSequence, token_ids: Sequence[int], reuse: Reuse) -> None:
    if reuse.hold is not None and reuse.num_tokens:
        await sequence.load(token_ids[: reuse.num_tokens], PooledKV(pool, reuse.hold.blocks, reuse.num_tokens))


async def page_out(
    engine: Engine, pool: Pool, claim: Claim, sequence: TokenSequence, reuse: Reuse, *, salt: str, ttl_s: float
) -> CacheEntry:
    """Store a whole sequence as a cache. Whole reused blocks are shared, not copied.

    Raises `Overloaded` if the pool has no room, `BundleUnusable` if the reused KV came from a bundle that is off now,
    and what `TokenSequence.fetch` raises.
    """
    await sequence.fetch(reuse.num_tokens)
    reuse = reuse.limited(sequence.num_loaded)
    return await engine.compute.run(
        partial(store, pool, sequence, reuse, salt=salt, ttl_s=ttl_s), priority=claim.priority
    )


def store(
    pool: Pool, sequence: TokenSequence, reuse: Reuse, *, salt: str, ttl_s: float, evict: bool = True
) -> CacheEntry:
    """The step of `page_out`. Runs on the compute thread."""
    return pool.store(
        tuple(sequence.token_ids),
        sequence.kv(reuse.num_tokens, sequence.num_tokens),
        salt,
        ttl_s=ttl_s,
        prefix=reuse.hold if reuse.num_tokens else None,
        evict=evict,
    )


# -- from the second tier -----------------------------------------------------------------------------------------


class Recaller:
    """Brings evicted caches back before a request looks for them: one at a time, in short steps on the compute thread.

    A cache that would take too long, or too many queued recalls, is skipped without an error. Its request does without
    it.
    """

    def __init__(self, engine: Engine, pool: Pool, *, max_waiting: int):
        self._engine = engine
        self._pool = pool
        self._queue = Admission(max_running=1, max_waiting=max_waiting)

    async def for_prompt(
        self,
        token_ids: Sequence[int],
        salt: str,
        params: KVTransferParams,
        *,
        priority: int = 0,
        deadline: float | None = None,
    ) -> None:
        """Recall the cache that `find_reuse` would look for, if it is in the second tier."""
        if params.cache_id is not None or params.reuse:
            max_s = MAX_RECALL_S if deadline is None else MAX_RECALL_SHARE * (deadline - time.monotonic())
            await self._recall(self._pool.find_evicted(token_ids, salt, params.cache_id), priority, max_s)

    async def for_lease(self, cache_id: str, salt: str) -> None:
        await self._recall(self._pool.find_evicted((), salt, cache_id), 0, MAX_RECALL_S)

    async def _recall(self, cache_id: str | None, priority: int, max_s: float) -> None:
        if cache_id is None:
            return
        try:
            async with asyncio.timeout(max_s), self._queue.admit(priority=priority):
                steps = self._pool.recall(cache_id)
                try:
                    while await self._engine.compute.run(partial(next, steps, _END), priority=priority) is not _END:
                        pass
                finally:
                    steps.close()
        except (Overloaded, TimeoutError):
            pass
