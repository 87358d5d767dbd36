"""Work for idle time: a little at a time, while nobody waits for anything else.

Mapped now, exact later: in idle time a hot mapped cache is read natively, and the exact one takes its place.

    mapped      |head|◄─── mapped ───►|◄─ native, over mapped ─►|    the chain: a handoff, and the turns on top of it
    idle        |◄──────── read natively, a little at a time ──►|    steps of lowest priority, none while others work
    exact       |◄─────────────────────────────────────────────►|    whoever names a cache of the chain gets this one

Requests that already use the old blocks keep them until they end. It never evicts anything, and takes no place among
the running requests. It ends with its cache: what is deleted or expires meanwhile is read no further and leaves nothing
behind, and the exact cache lives no longer than the mapped one would have. So it does when real work leaves it no time.
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

STEP_TOKENS = 64  # what real work waits for at most
PATIENCE_S = 60.0  # the longest wait for one step: what the work holds is pinned meanwhile


class IdleTime:
    """The time of an engine that has been idle for `idle_s`."""

    def __init__(self, engine: Engine, idle_s: float, *, patience_s: float = PATIENCE_S):
        self._engine = engine
        self._idle_s = idle_s
        self._patience_s = patience_s

    async def run(self, work: Callable[[], Awaitable[bool]], what: str, count_failure: Callable[[str], None]) -> None:
        """For ever does `work`, which tells whether there was any. What fails is counted by its code, and logged where
        it is a bug."""
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
        """One step of at most `STEP_TOKENS`, of the lowest priority, in idle time, if `check` lets it pass then. Raises
        what that raises, and `Overloaded` where real work leaves no time for it."""
        try:
            async with asyncio.timeout(self._patience_s):
                await self._until_idle(check)
                return await work()
        except TimeoutError as error:
            raise Overloaded(f"no idle time for {self._patience_s:g} s while {what}") from error

    async def _until_idle(self, check: Callable[[], None] = lambda: None) -> None:
        """`check` runs whenever it looks, last of all when it is idle."""
        check()
        while not self._is_idle():
            await asyncio.sleep(min(0.1, self._idle_s))
            check()

    def _is_idle(self) -> bool:
        admission = self._engine.admission
        quiet_s = time.monotonic() - self._engine.compute.busy_at
        return not (admission.num_running or admission.num_waiting) and quiet_s >= self._idle_s


MIN_LIFE_S = 5.0  # a cache that ends sooner is not worth it
MAX_COUNTED = 1024


def choose_hot(
    entries: Sequence[CacheEntry], uses: Mapping[str, int], *, free_blocks: int, block_tokens: int, now: float
) -> CacheEntry | None:
    """The mapped cache to read natively: the one that was used most, then the longest; None if none is worth it.
    `uses` counts the answers that each took part in, those of the caches below it included."""
    worth = [
        entry
        for entry in entries
        if uses.get(entry.cache_id, 0)
        and entry.expires_at - now > MIN_LIFE_S
        and blocks_for(entry.num_tokens, block_tokens) <= free_blocks
    ]
    return max(worth, key=lambda entry: (uses[entry.cache_id], entry.num_tokens), default=None)


class UsageCounts:
    """How often answers used each mapped cache. Bounded: the least recently used counts go first."""

    def __init__(self) -> None:
        self.counts: OrderedDict[str, int] = OrderedDict()

    def note(self, served: CacheEntry | None, kept: CacheEntry | None) -> None:
        """An answer was served from one cache and kept as another, which is on top of it."""
        if served is None or served.is_exact:
            return
        count = self.counts.get(served.cache_id, 0) + 1
        for entry in (served, kept):
            if entry is not None:
                self.counts[entry.cache_id] = count
                self.counts.move_to_end(entry.cache_id)
        while len(self.counts) > MAX_COUNTED:
            self.counts.popitem(last=False)


class Upgrader:
    """Upgrades the caches of one pool, one at a time, when the engine has been idle for `idle_s`."""

    def __init__(
        self, engine: Engine, pool: Pool, metrics: WorkerMetrics, idle_s: float, *, patience_s: float = PATIENCE_S
    ):
        self.uses = UsageCounts()
        self._engine = engine
        self._pool = pool
        self._metrics = metrics
        self._idle = IdleTime(engine, idle_s, patience_s=patience_s)

    async def run(self) -> None:
        """For ever. What fails is counted and logged."""
        await self._idle.run(self.upgrade_one, "upgrade", lambda code: self._metrics.upgrades.labels(code).inc())

    async def upgrade_one(self) -> bool:
        """Whether there was a cache to upgrade."""
        tip = choose_hot(
            self._pool.mapped_caches(),
            self.uses.counts,
            free_blocks=self._pool.stats.free_blocks,
            block_tokens=self._pool.layout.block_tokens,
            now=time.time(),
        )
        if tip is None:
            return False
        self.uses.counts.pop(tip.cache_id)  # if it fails, it is tried again when it was used again
        num_replaced = await self._upgrade(tip)
        self._metrics.upgrades.labels("ok").inc()
        log.info("upgraded", cache=tip.cache_id, num_tokens=tip.num_tokens, num_replaced=num_replaced)
        return True

    async def _upgrade(self, tip: CacheEntry) -> int:
        """Read the tip's tokens natively, from the longest exact prefix on, and put the result in its place."""
        claim, token_ids = Claim(priority=BACKGROUND), tip.token_ids
        with find_reuse(self._pool, token_ids, tip.tenant_salt, KVTransferParams()) as reuse:
            async with self._engine.sequence(claim, len(token_ids)) as sequence:
                await self._step(tip, partial(load_reused, self._pool, sequence, token_ids, reuse))
                for begin in range(reuse.num_tokens, len(token_ids), STEP_TOKENS):
                    await self._step(tip, partial(sequence.prefill, token_ids[begin : begin + STEP_TOKENS]))
                await self._step(tip, partial(sequence.fetch, reuse.num_tokens))
                put = partial(self._put_in_place, tip, sequence, reuse)
                return await self._step(tip, partial(self._engine.compute.run, put, priority=claim.priority))

    async def _step(self, tip: CacheEntry, work: Callable[[], Awaitable[R]]) -> R:
        """One step, in idle time, if the tip still stands then. Raises `CacheNotFound`, `Overloaded`."""
        return await self._idle.step(work, f"{tip.cache_id} was read again", partial(self._check_stands, tip))

    def _put_in_place(self, tip: CacheEntry, sequence: TokenSequence, reuse: Reuse) -> int:
        """How many caches were replaced. Runs on the compute thread, whole: nothing is stored that replaces nothing.
        Raises `PoolFull` where others have taken the room meanwhile."""
        ttl_s = tip.expires_at - time.time()
        exact = store(self._pool, sequence, reuse, salt=tip.tenant_salt, ttl_s=ttl_s, evict=False)
        num_replaced = self._pool.supersede(exact, tip=tip)
        if not num_replaced:
            self._pool.drop(exact.cache_id, tip.tenant_salt)
            raise _gone(tip)
        return num_replaced

    def _check_stands(self, tip: CacheEntry) -> None:
        if not self._pool.contains(tip):
            raise _gone(tip)


def _gone(tip: CacheEntry) -> CacheNotFound:
    return CacheNotFound(f"{tip.cache_id} was deleted, replaced, or expired while it was read again")
