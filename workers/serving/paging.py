"""Between the pool's blocks and a sequence's working memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from mappers.cache import KVCache
from workers.engines.admission import Claim
from workers.engines.base import Engine, PoolPlace, TokenSequence
from workers.pool.blocks import blocks_for
from workers.pool.entries import CacheEntry
from workers.pool.pool import Pool
from workers.serving.reuse import Reuse


@dataclass(frozen=True)
class PooledKV:
    """The first tokens of the sequence in blocks that somebody holds, as an engine's `KVSource`."""

    pool: Pool
    blocks: tuple[int, ...]
    num_tokens: int

    def __call__(self, views: KVCache) -> object:
        return self.pool.gather(self.blocks, 0, self.num_tokens, views)

    @property
    def place(self) -> PoolPlace:
        used = self.blocks[: blocks_for(self.num_tokens, self.pool.layout.block_tokens)]
        generations = tuple(self.pool.arena.generations_of(used))
        return PoolPlace(self.pool.export(), self.pool.layout, used, generations)


async def page_in(pool: Pool, sequence: TokenSequence, token_ids: Sequence[int], reuse: Reuse) -> Reuse:
    """Fill an empty sequence with a prompt: what is reused out of the pool, the rest read natively. What was reused in
    truth, which is less where it could not be loaded."""
    await load_reused(pool, sequence, token_ids, reuse)
    await sequence.read(token_ids[reuse.num_tokens :])
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
