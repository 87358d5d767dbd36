"""Work for idle time (`IdleTime`), and the upgrade of hot mapped caches to exact ones (`Upgrader`).

    mapped      |head|◄─── mapped ───►|◄─ native, over mapped ─►|    a handoff's cache, and the turns on top of it
    idle        |◄──────── native prefill, a little at a time ─►|    steps of lowest priority, none while others work
    exact       |◄─────────────────────────────────────────────►|    replaces all of these caches, under their ids

Requests that already use the old blocks keep them until they end. An upgrade evicts nothing and takes no slot of the
running requests. If its cache is deleted or expires meanwhile, or other work leaves no time, it stops without a trace.
The exact cache expires when the mapped one would have.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import structlog

from workers.api.errors import CacheNotFound, KvrelayError, Overloaded
from workers.api.schemas import KVTransferParams
from workers.engines.base import Engine, TokenSequence
from workers.engines.scheduling import BACKGROUND, Claim
from workers.metrics import WorkerMetrics
from workers.pool.blocks import blocks_for
from workers.pool.entries import CacheEntry
from workers.pool.pool import Pool
from workers.serving.reuse import Reuse, find_reuse, load_reused, store

log = structlog.get_logger()

R = TypeVar("R")

STEP_TOKENS = 64  # other work waits for at most one step
MAX_WAIT_S = 60.0  # for idle time, per step: blocks that the work holds are pinned meanwhile
MIN_LIFE_S = 5.0  # a cache that expires sooner is not upgraded
MAX_COUNTED = 1024


class IdleTime:
    """The time in which an engine has been idle for `idle_s`."""

    def __init__(self, engine: Engine, idle_s: float, *, max_wait_s: float = MAX_WAIT_S):
        self._engine = engine
        self._idle_s = idle_s
        self._max_wait_s = max_wait_s

    async def run(self, work: Callable[[], Awaitable[bool]], what: str, count_failure: Callable[[str], None]) -> None:
        """Call `work` forever; it returns whether there was any. Errors are counted by code, and logged if they are
        bugs."""
        while True:
            await self._until_idle()
            try:
                if await work():
                    continue
            except KvrelayError as error:
                count_failure(error.code)
            except Exception:
                log.exception(f"{what}_failed")
                count_failure("internal_error")
            await asyncio.sleep(self._idle_s)

    async def step(self, work: Callable[[], Awaitable[R]], what: str, check: Callable[[], None] = lambda: None) -> R:
        """Run one step of lowest priority, of at most `STEP_TOKENS`, in idle time. Raises what `check` raises while
        waiting, and `Overloaded` if other work leaves no time."""
        try:
            async with asyncio.timeout(self._max_wait_s):
                await self._until_idle(check)
                return await work()
        except TimeoutError as error:
            raise Overloaded(f"no idle time for {self._max_wait_s:g} s to {what}") from error

    async def _until_idle(self, check: Callable[[], None] = lambda: None) -> None:
        """Wait until the engine is idle. Calls `check` at each poll, and last when it is idle."""
        admission, compute = self._engine.admission, self._engine.compute
        check()
        while admission.num_running or admission.num_waiting or time.monotonic() - compute.busy_at < self._idle_s:
            await asyncio.sleep(min(0.1, self._idle_s))
            check()


def choose_hot(
    entries: Sequence[CacheEntry], uses: Mapping[str, int], *, free_blocks: int, block_tokens: int, now: float
) -> CacheEntry | None:
    """Choose the mapped cache to upgrade: the one used most, then the longest; None if none is worth it. `uses` counts
    the answers that used each cache, including those of the caches below it."""
    candidates = [
        entry
        for entry in entries
        if uses.get(entry.cache_id, 0)
        and entry.expires_at - now > MIN_LIFE_S
        and blocks_for(entry.num_tokens, block_tokens) <= free_blocks
    ]
    return max(candidates, key=lambda entry: (uses[entry.cache_id], entry.num_tokens), default=None)


class UsageCounts:
    """Counts how often answers used each mapped cache. Bounded: the least recently used counts are dropped first."""

    def __init__(self) -> None:
        self.counts: OrderedDict[str, int] = OrderedDict()

    def count(self, served: CacheEntry | None, stored: CacheEntry | None) -> None:
        """Count an answer that was served from one cache, and stored as another on top of it."""
        if served is None or served.is_exact:
            return
        count = self.counts.get(served.cache_id, 0) + 1
        for entry in (served, stored):
            if entry is not None:
                self.counts[entry.cache_id] = count
                self.counts.move_to_end(entry.cache_id)
        while len(self.counts) > MAX_COUNTED:
            self.counts.popitem(last=False)


class Upgrader:
    """Upgrades the caches of one pool, one at a time, when the engine has been idle for `idle_s`."""

    def __init__(
        self, engine: Engine, pool: Pool, metrics: WorkerMetrics, idle_s: float, *, max_wait_s: float = MAX_WAIT_S
    ):
        self.usage_counts = UsageCounts()
        self._engine = engine
        self._pool = pool
        self._metrics = metrics
        self._idle = IdleTime(engine, idle_s, max_wait_s=max_wait_s)

    async def run(self) -> None:
        """Run forever. Failures are counted and logged."""
        await self._idle.run(self.upgrade_one, "upgrade", lambda code: self._metrics.upgrades.labels(code).inc())

    async def upgrade_one(self) -> bool:
        """Upgrade the hottest cache. Returns whether there was one."""
        tip = choose_hot(
            self._pool.mapped_caches(),
            self.usage_counts.counts,
            free_blocks=self._pool.stats.free_blocks,
            block_tokens=self._pool.layout.block_tokens,
            now=time.time(),
        )
        if tip is None:
            return False
        self.usage_counts.counts.pop(tip.cache_id)  # after a failure, the next use makes it a candidate again
        num_replaced = await self._upgrade(tip)
        self._metrics.upgrades.labels("ok").inc()
        log.info("upgraded", cache=tip.cache_id, num_tokens=tip.num_tokens, num_replaced=num_replaced)
        return True

    async def _upgrade(self, tip: CacheEntry) -> int:
        """Prefill the tip's tokens natively, after the longest exact prefix, and replace it by the result."""
        claim, token_ids = Claim(priority=BACKGROUND), tip.token_ids
        with find_reuse(self._pool, token_ids, tip.tenant_salt, KVTransferParams()) as reuse:
            async with self._engine.sequence(claim, len(token_ids)) as sequence:
                await self._step(tip, partial(load_reused, self._pool, sequence, token_ids, reuse))
                for begin in range(reuse.num_tokens, len(token_ids), STEP_TOKENS):
                    await self._step(tip, partial(sequence.prefill, token_ids[begin : begin + STEP_TOKENS]))
                await self._step(tip, partial(sequence.fetch, reuse.num_tokens))
                replace = partial(self._replace, tip, sequence, reuse)
                return await self._step(tip, partial(self._engine.compute.run, replace, priority=claim.priority))

    async def _step(self, tip: CacheEntry, work: Callable[[], Awaitable[R]]) -> R:
        """Run one step in idle time while the tip exists. Raises `CacheNotFound`, `Overloaded`."""
        return await self._idle.step(work, f"upgrade {tip.cache_id}", partial(self._check_exists, tip))

    def _replace(self, tip: CacheEntry, sequence: TokenSequence, reuse: Reuse) -> int:
        """Store the exact cache, supersede the mapped ones, and return how many there were; or store nothing. Runs on
        the compute thread. Raises `PoolFull` if others have taken the room meanwhile."""
        ttl_s = tip.expires_at - time.time()
        exact = store(self._pool, sequence, reuse, salt=tip.tenant_salt, ttl_s=ttl_s, evict=False)
        num_replaced = self._pool.supersede(exact, tip=tip)
        if not num_replaced:
            self._pool.drop(exact.cache_id, tip.tenant_salt)
            raise _gone(tip)
        return num_replaced

    def _check_exists(self, tip: CacheEntry) -> None:
        if not self._pool.contains(tip):
            raise _gone(tip)


def _gone(tip: CacheEntry) -> CacheNotFound:
    return CacheNotFound(f"{tip.cache_id} was deleted, replaced or expired during its upgrade")
