"""Bringing back, before a request looks for it, what the pool has moved to its second tier."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import partial

from workers.api.errors import Overloaded
from workers.api.schemas import KVTransferParams
from workers.engines.admission import Admission
from workers.engines.base import Engine
from workers.pool.pool import Pool

PATIENCE_S = 2.0  # whoever asks has a prompt that can be read instead
PATIENCE_SHARE = 0.25  # of the time that a request has left
_END = object()


class Recalls:
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
        """What `reuse_of` would look for in vain, if the pool has it elsewhere."""
        if params.cache_id is not None or params.reuse:
            left_s = PATIENCE_S if deadline is None else PATIENCE_SHARE * (deadline - time.monotonic())
            await self._recall(self._pool.evicted(token_ids, salt, params.cache_id), priority, left_s)

    async def for_lease(self, cache_id: str, salt: str) -> None:
        await self._recall(self._pool.evicted((), salt, cache_id), 0, PATIENCE_S)

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
