"""Reading a prefix ahead of the requests that share it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from workers.api.errors import ContextLengthExceeded
from workers.api.schemas import KVTransferParams, PrefillReply, PrefillRequest
from workers.digest import token_digest
from workers.engines.base import Engine
from workers.metrics import WorkerMetrics
from workers.pool.entries import CacheEntry
from workers.pool.pool import Pool
from workers.serving.paging import page_in, page_out
from workers.serving.prompts import PromptReader
from workers.serving.recall import Recalls
from workers.serving.reuse import reuse_of
from workers.sharing import SharedWork

PATIENCE_S = 3600.0  # of a caller who names no deadline


@dataclass(frozen=True)
class _Done:
    entry: CacheEntry
    cached_tokens: int
    prefill_s: float


class Prefiller:
    """Reads prefixes into the pool. The same prefix asked for twice at once is read once."""

    def __init__(
        self,
        engine: Engine,
        pool: Pool,
        prompts: PromptReader,
        metrics: WorkerMetrics,
        recalls: Recalls,
        max_jobs: int,
    ):
        self._engine = engine
        self._pool = pool
        self._prompts = prompts
        self._metrics = metrics
        self._recalls = recalls
        self._work: SharedWork[_Done] = SharedWork(max_jobs=max_jobs)

    async def aclose(self) -> None:
        await self._work.aclose()

    async def prefill(self, request: PrefillRequest) -> PrefillReply:
        """Raises `InvalidRequest`, `Overloaded`, `DeadlineExceeded`."""
        token_ids = await self._prompts.read_stable(request)
        if len(token_ids) > self._engine.model.max_model_len:
            raise ContextLengthExceeded(
                f"{len(token_ids)} tokens to read; the context length is {self._engine.model.max_model_len}"
            )
        done = await self._shared(token_ids, request)
        return PrefillReply(
            cache_id=done.entry.cache_id,
            num_tokens=done.entry.num_tokens,
            digest=done.entry.digest,
            epoch=self._pool.epoch,
            expires_at=done.entry.expires_at,
            cached_tokens=done.cached_tokens,
            prefill_ms=done.prefill_s * 1e3,
        )

    async def _shared(self, token_ids: Sequence[int], request: PrefillRequest) -> _Done:
        patience_s = PATIENCE_S if request.deadline_ms is None else request.deadline_ms / 1e3
        key = (token_digest(token_ids, request.tenant_salt), request.ttl_s)
        return await self._work.run(
            key,
            time.monotonic() + patience_s,
            lambda job: self._read(token_ids, request.tenant_salt, request.ttl_s),
        )

    async def _read(self, token_ids: Sequence[int], salt: str, ttl_s: float) -> _Done:
        params = KVTransferParams()
        await self._recalls.for_prompt(token_ids, salt, params)
        with reuse_of(self._pool, token_ids, salt, params) as reuse:
            async with self._engine.admit() as claim, self._engine.sequence(claim, len(token_ids)) as sequence:
                began = time.monotonic()
                reuse = await page_in(self._pool, sequence, token_ids, reuse)
                prefill_s = time.monotonic() - began
                entry = await page_out(self._engine, self._pool, claim, sequence, reuse, salt=salt, ttl_s=ttl_s)
        self._metrics.prefill.observe(prefill_s)
        self._metrics.prefix_queries.inc(len(token_ids))
        self._metrics.prefix_hits.inc(reuse.cached_tokens)
        return _Done(entry, reuse.cached_tokens, prefill_s)
