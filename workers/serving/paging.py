"""Between the pool's blocks and a sequence's working memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from workers.engines.admission import Claim
from workers.engines.base import Engine, TokenSequence
from workers.pool.entries import CacheEntry
from workers.pool.pool import Pool
from workers.serving.reuse import Reuse


async def page_in(pool: Pool, sequence: TokenSequence, token_ids: Sequence[int], reuse: Reuse) -> None:
    """Fill an empty sequence with a prompt: what is reused out of the pool, the rest read natively."""
    await load_reused(pool, sequence, token_ids, reuse)
    await sequence.read(token_ids[reuse.num_tokens :])


async def load_reused(pool: Pool, sequence: TokenSequence, token_ids: Sequence[int], reuse: Reuse) -> None:
    """The first part of `page_in`."""
    if reuse.hold is not None and reuse.num_tokens:
        source = partial(pool.gather, reuse.hold.blocks, 0, reuse.num_tokens)
        await sequence.load(token_ids[: reuse.num_tokens], source)


async def page_out(
    engine: Engine, pool: Pool, claim: Claim, sequence: TokenSequence, reuse: Reuse, *, salt: str, ttl_s: float
) -> CacheEntry:
    """Keep everything that stands in a sequence as a cache; blocks that were reused whole are shared, not copied.

    Raises `Overloaded` or `InvalidRequest` if the pool has no room.
    """
    return await engine.compute.run(
        partial(store, pool, sequence, reuse, salt=salt, ttl_s=ttl_s), priority=claim.priority
    )


def store(pool: Pool, sequence: TokenSequence, reuse: Reuse, *, salt: str, ttl_s: float) -> CacheEntry:
    """The step of `page_out`. Runs on the compute thread."""
    return pool.store(
        tuple(sequence.token_ids),
        sequence.kv(reuse.num_tokens, sequence.num_tokens),
        salt,
        ttl_s=ttl_s,
        prefix=reuse.hold if reuse.num_tokens else None,
    )
