"""`Reuse`: how much of a prompt stands in the pool already, and of what kind.

    prompt    |◄──────── num_tokens out of the pool ────────►|◄── read natively, at least one ──►|
    mapped    | head |◄── mapped_tokens ──►|  native over it |

With a cache id, that cache and no other is used, up to the longest common token prefix with this very prompt. Without,
the longest exact prefix is found by its tokens; nothing that came from a mapper, or was read over such, is found so.
Fewer than `MIN_LOADED_TOKENS` are not used.

Between the pool's blocks and a sequence's working memory.

Bringing back, before a request looks for it, what the pool has moved to its second tier."""

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


@dataclass(frozen=True)
class Reuse:
    """The first `num_tokens` of a prompt, out of the blocks of `hold`; None if nothing can be used."""

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
        """Tokens whose KV a mapper wrote."""
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

    def cut(self, num_tokens: int) -> Reuse:
        """What is left of it where no more than so many tokens were used."""
        return self if num_tokens >= self.num_tokens else _from(self.hold, num_tokens)


@contextmanager
def find_reuse(pool: Pool, token_ids: Sequence[int], salt: str, params: KVTransferParams) -> Iterator[Reuse]:
    """What of a prompt can be reused; its blocks stay as they are inside the block. At least one token is left to read.

    Raises `CacheNotFound` and `CacheMismatch` for a cache id that may not serve this prompt.
    """
    limit = min(len(token_ids) - 1, params.num_tokens or len(token_ids))
    if params.cache_id is not None:
        with pool.hold(params.cache_id, salt, require_exact=params.require_exact) as hold:
            yield _from(hold, _usable(hold, token_ids, limit))
    elif params.reuse:
        with pool.match_prefix(token_ids[:limit], salt) as hold:
            yield _from(hold, hold.num_tokens)
    else:
        yield Reuse()


def _from(hold: Hold | None, num_tokens: int) -> Reuse:
    return Reuse(hold, num_tokens) if num_tokens >= MIN_LOADED_TOKENS else Reuse()


def _usable(hold: Hold, token_ids: Sequence[int], limit: int) -> int:
    entry = hold.entry
    assert entry is not None, "a hold by cache id has its cache"
    common = entry.common_prefix(token_ids)
    if common == 0:
        raise CacheMismatch(f"{entry.cache_id} and this prompt have no first token in common", param="cache_id")
    return min(common, limit)


@dataclass(frozen=True)
class PooledKV:
    """The first tokens of the sequence in blocks that somebody holds, as an engine's `KVSource`."""

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
    """Fill an empty sequence with a prompt: what is reused out of the pool, the rest read natively. What was reused in
    truth, which is less where it could not be loaded."""
    await load_reused(pool, sequence, token_ids, reuse)
    await sequence.prefill(token_ids[reuse.num_tokens :])
    return reuse.cut(sequence.num_loaded)


async def load_reused(pool: Pool, sequence: TokenSequence, token_ids: Sequence[int], reuse: Reuse) -> None:
    """The first part of `page_in`."""
    if reuse.hold is not None and reuse.num_tokens:
        await sequence.load(token_ids[: reuse.num_tokens], PooledKV(pool, reuse.hold.blocks, reuse.num_tokens))


async def page_out(
    engine: Engine, pool: Pool, claim: Claim, sequence: TokenSequence, reuse: Reuse, *, salt: str, ttl_s: float
) -> CacheEntry:
    """Keep everything that stands in a sequence as a cache; blocks that were reused whole are shared, not copied.

    Raises `Overloaded` if the pool has no room, `BundleUnusable` if what was reused came from a bundle that is off by
    now, and what `TokenSequence.fetch` raises.
    """
    await sequence.fetch(reuse.num_tokens)
    reuse = reuse.cut(sequence.num_loaded)
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


PATIENCE_S = 2.0  # whoever asks has a prompt that can be read instead
PATIENCE_SHARE = 0.25  # of the time that a request has left
_END = object()


class Recaller:
    """One cache comes back at a time, by short steps on the compute thread. What would wait too long, or behind too
    many, does not come back: it is a cache that is not here, and its request does without."""

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
        """What `find_reuse` would look for in vain, if the pool has it elsewhere."""
        if params.cache_id is not None or params.reuse:
            left_s = PATIENCE_S if deadline is None else PATIENCE_SHARE * (deadline - time.monotonic())
            await self._recall(self._pool.find_evicted(token_ids, salt, params.cache_id), priority, left_s)

    async def for_lease(self, cache_id: str, salt: str) -> None:
        await self._recall(self._pool.find_evicted((), salt, cache_id), 0, PATIENCE_S)

    async def _recall(self, cache_id: str | None, priority: int, within_s: float) -> None:
        if cache_id is None:
            return
        try:
            async with asyncio.timeout(within_s), self._queue.admit(priority=priority):
                await self._bring_back(cache_id, priority)
        except (Overloaded, TimeoutError):
            pass

    async def _bring_back(self, cache_id: str, priority: int) -> None:
        steps = self._pool.recall(cache_id)
        try:
            while await self._engine.compute.run(partial(next, steps, _END), priority=priority) is not _END:
                pass
        finally:
            steps.close()
