"""Bringing back, before a request looks for it, what the pool has moved to its second tier."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from workers.api.schemas import KVTransferParams
from workers.engines.base import Engine
from workers.pool.pool import Pool


async def recall_for(
    engine: Engine, pool: Pool, token_ids: Sequence[int], salt: str, params: KVTransferParams, *, priority: int = 0
) -> None:
    """What `reuse_of` would look for in vain, if the pool has it elsewhere."""
    if params.cache_id is not None or params.reuse:
        await _recall(engine, pool, pool.evicted(token_ids, salt, params.cache_id), priority)


async def recall_cache(engine: Engine, pool: Pool, cache_id: str, salt: str, *, priority: int = 0) -> None:
    """One cache, for a lease."""
    await _recall(engine, pool, pool.evicted((), salt, cache_id), priority)


async def _recall(engine: Engine, pool: Pool, cache_id: str | None, priority: int) -> None:
    if cache_id is not None:
        await engine.compute.run(partial(pool.recall, cache_id), priority=priority)
