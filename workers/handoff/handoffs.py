"""`Handoffs`: the handoffs into one worker.

    1. ticket    lease the source cache; check tenant, tokens, weights, provenance, layout
    2. decide    share what is mapped here already; by cost, map less than requested, or nothing
    3. allocate  blocks of this pool, and open the source's pool by the fastest transport that works
    4. head      prefill the first few tokens from the ticket's token ids
    5. chunks    from the source's blocks to ours, a layer copied or mapped: one compute step each, so that others
                 decode in between; each checks the deadline and the source's generations
    6. put       if its bundle is still in use, the new cache gets its id and is marked as mapped
    finally      the hold on the blocks and the lease are released, whatever happened

Equal handoffs at the same time share one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial

from torch import Tensor

from mappers.mapper import TogetherSink
from workers.api.errors import (
    BundleUnusable,
    DeadlineExceeded,
    InvalidRequest,
    KvrelayError,
    NoTime,
    PrefillCheaper,
    TransferFailed,
)
from workers.api.schemas import LeaseRequest, Ticket, TransferReply, TransferRequest
from workers.handoff.plan import CostQuery, HandoffHistory, HandoffPlan, decide, plan_handoff
from workers.handoff.source import SourceReader
from workers.handoff.target import HandoffResult, HandoffTarget, SourcePeer
from workers.pool.blocks import BlockSpan, blocks_for
from workers.pool.entries import CacheEntry, Hold, Span
from workers.sharing import Job, SharedWork

log = logging.getLogger(__name__)

LEASE_MARGIN_S = 5.0  # by which a lease outlasts the first caller's deadline: another with a later one may join
MAX_LEASE_S = 600.0
DEADLINE_SLACK_S = 0.1  # a caller counts its deadline from before its request arrives, so it gives up a little earlier
RELEASE_TIMEOUT_S = 1.0


@dataclass
class HandoffTimer:
    """Seconds spent in the parts of one handoff. Mapping and writing interleave; `mapping_s` holds both."""

    started: float = field(default_factory=time.perf_counter)
    lease_s: float = 0.0
    check_s: float = 0.0
    head_s: float = 0.0
    open_s: float = 0.0
    copy_s: float = 0.0
    mapping_s: float = 0.0
    write_s: float = 0.0
    scratch_bytes: int = 0
    transport: str = "none"

    @property
    def total_s(self) -> float:
        return time.perf_counter() - self.started


class Handoffs:
    """For use on one event loop."""

    def __init__(self, target: HandoffTarget):
        self._target = target
        self._history = HandoffHistory(target.pool)
        self._work: SharedWork[TransferReply] = SharedWork(max_jobs=target.max_handoffs)
        self._releases: set[asyncio.Task[None]] = set()

    async def transfer(self, request: TransferRequest, *, peer: SourcePeer) -> TransferReply:
        """Map a cache of `peer`, the client of `request.source_worker`, into this worker's pool.

        Raises `CacheNotFound`, `CacheStale`, `CacheMismatch` (tenant, tokens, layout, provenance), `BundleUnusable`,
        `InvalidRequest`, `Overloaded` (also if this pool is full), `DeadlineExceeded`, `TransferFailed`,
        `WorkerUnavailable`, and with `by_cost` `PrefillCheaper` and `NoTime`. An error or a cancellation leaves nothing
        behind.
        """
        if request.target_model not in (None, self._target.model):
            raise InvalidRequest(
                f"unknown model {request.target_model!r}; this worker runs {self._target.model!r}", param="target_model"
            )
        key = tuple(request.model_dump(exclude={"deadline_ms"}).values())
        deadline = time.monotonic() + request.deadline_ms / 1000
        return await self._work.run(key, deadline, lambda job: self._run(request, peer, job))

    async def aclose(self) -> None:
        """Stop running handoffs, and wait until they have cleaned up and released their leases."""
        await self._work.aclose()
        if self._releases:
            await asyncio.wait(self._releases)

    async def _run(self, request: TransferRequest, peer: SourcePeer, job: Job[TransferReply]) -> TransferReply:
        timer = HandoffTimer()
        try:
            plan, entry = await self._hand_over(request, peer, job, timer)
        except (Exception, asyncio.CancelledError) as error:
            self._target.observe(HandoffResult(_result_of(error, job), timer.total_s))
            raise
        reply = _reply(entry, plan, self._target.pool.epoch, timer)
        self._target.observe(HandoffResult("ok", timer.total_s, plan.num_mapped, reply))
        return reply

    async def _hand_over(
        self, request: TransferRequest, peer: SourcePeer, job: Job[TransferReply], timer: HandoffTimer
    ) -> tuple[HandoffPlan, CacheEntry]:
        target = self._target
        job.check()
        ttl_s = min(job.remaining_s + LEASE_MARGIN_S, MAX_LEASE_S)
        lease = LeaseRequest(ttl_s=ttl_s, tenant_salt=request.tenant_salt)
        # A lease that is granted and whose ticket never arrives expires by itself.
        ticket = await peer.lease(request.cache_id, lease, timeout_s=job.remaining_s)
        timer.lease_s = timer.total_s
        is_done = False
        try:
            plan = plan_handoff(request, ticket, target.pool, target.mappers(), max_tokens=target.max_tokens)
            earlier, reused = self._history.longest(plan, request.tenant_salt)
            with earlier:
                plan = replace(plan, reused=reused)
                if request.by_cost:
                    plan = self._limit_by_cost(plan, job)
                timer.check_s = timer.total_s - timer.lease_s
                entry = await self._transfer(plan, earlier.blocks, request, job, timer)
            is_done = True
        finally:
            # Without waiting: the peer may be frozen, and its leases expire.
            release = asyncio.create_task(self._release(peer, ticket, drop=is_done and target.release_source))
            self._releases.add(release)
            release.add_done_callback(self._releases.discard)
        return plan, entry

    def _limit_by_cost(self, plan: HandoffPlan, job: Job[TransferReply]) -> HandoffPlan:
        """Shorten the plan as its costs require. Raises `PrefillCheaper`, `NoTime`."""
        query = CostQuery(
            head=plan.head,
            reused=plan.reused,
            end=plan.num_tokens,
            source_tokens=plan.ticket.num_tokens,
            block_tokens=self._target.pool.layout.block_tokens,
            remaining_s=job.remaining_s,
            share=self._target.native_share,
        )
        decision = decide(query, self._target.costs())
        predicted = f"a handoff of {plan.num_tokens} tokens would take {decision.predicted_s or 0:.3f} s"
        if decision.kind == "prefill":
            raise PrefillCheaper(f"{predicted}, a prefill {decision.native_s or 0:.3f} s")
        if decision.kind == "late":
            raise NoTime(f"{predicted}; {job.remaining_s:.3f} s are left")
        return replace(plan, num_tokens=decision.end, is_hybrid=decision.kind == "hybrid", reason=decision.reason)

    async def _transfer(
        self,
        plan: HandoffPlan,
        earlier: Sequence[int],
        request: TransferRequest,
        job: Job[TransferReply],
        timer: HandoffTimer,
    ) -> CacheEntry:
        """Steps 3 to 6: allocate, open, prefill the head, map the chunks, and put the result into the pool."""
        target, pool, size = self._target, self._target.pool, self._target.pool.layout.block_tokens
        shared = tuple(earlier[: plan.reused // size])
        with ExitStack() as stack:
            # 3. Entered inside the step: if it ends under cancellation, its result is lost, but not the hold.
            holds: list[Hold] = []
            needed, num_whole = blocks_for(plan.num_tokens, size) - len(shared), plan.num_tokens // size - len(shared)
            allocate = partial(pool.allocate, needed, evict=not target.is_trial, num_overwritten=num_whole)
            await target.run_step(lambda: holds.append(stack.enter_context(allocate())))
            blocks = shared + holds[0].blocks
            started = time.perf_counter()
            source = SourceReader(target, request.source_worker, plan.ticket, job)
            await source.open()
            timer.open_s = time.perf_counter() - started
            # 4.
            if plan.head and not shared:
                job.check()
                await self._prefill_head(plan, request.tenant_salt, blocks, timer)
            # 5.
            for begin, end in chunks(plan.begin, plan.num_tokens, target.chunk_tokens):
                job.check()
                await source.use(begin, end, partial(self._map, plan, blocks, timer))
            timer.copy_s += source.copy_s
            timer.scratch_bytes += source.copy_bytes
            timer.transport = source.kind
            # 6. The bundle may have been switched off meanwhile, and its caches dropped.
            if plan.mapper not in target.mappers():
                raise BundleUnusable(f"bundle {plan.mapper.bundle_id} was switched off meanwhile", param="mapper")
            entry = pool.put(
                blocks,
                plan.token_ids,
                request.tenant_salt,
                ttl_s=request.ttl_s,
                provenance=plan.provenance,
                mapped=Span(plan.head, plan.num_tokens),
                is_hybrid=plan.is_hybrid,
                allow_barred=target.is_trial,
            )
        self._history.add(entry)
        return entry

    async def _prefill_head(self, plan: HandoffPlan, salt: str, blocks: Sequence[int], timer: HandoffTimer) -> None:
        started = time.perf_counter()
        kv = await self._target.prefill_head(plan.token_ids[: plan.head], salt)
        if (kv.start, kv.num_tokens) != (0, plan.head):
            raise TransferFailed(
                f"the engine prefilled {kv.num_tokens} tokens from {kv.start} instead of [0, {plan.head})"
            )
        await self._target.run_step(lambda: self._target.pool.scatter(blocks, kv))
        timer.head_s = time.perf_counter() - started

    def _map(self, plan: HandoffPlan, blocks: Sequence[int], timer: HandoffTimer, span: BlockSpan) -> None:
        """Write one chunk of the source into `blocks`: copied layers from block to block, the others by the mapper.
        Runs on the compute thread."""
        mapper = plan.mapper
        with self._target.pool.writing(blocks, span.start, span.start + span.num_tokens) as writer:
            started = time.perf_counter()
            writer.copy(span, mapper.manifest.copies)
            copied = time.perf_counter()
            mapper.map_together(span, _timed(writer.write, timer), copies=False)
            mapped = time.perf_counter()
        timer.copy_s += copied - started
        timer.mapping_s += mapped - copied
        timer.scratch_bytes = max(timer.scratch_bytes, span.scratch_bytes + mapper.scratch_bytes)

    async def _release(self, peer: SourcePeer, ticket: Ticket, *, drop: bool) -> None:
        """End the lease; with `drop`, the source worker drops its cache too."""
        try:
            async with asyncio.timeout(RELEASE_TIMEOUT_S):
                await peer.release(ticket.cache_id, ticket.lease_id, timeout_s=RELEASE_TIMEOUT_S)
                if drop:
                    await peer.drop(ticket.cache_id, timeout_s=RELEASE_TIMEOUT_S)
                    self._target.source_released()
        except (KvrelayError, TimeoutError) as error:
            log.info("releasing a source failed; its lease will expire: %s", error)


def _result_of(error: BaseException, job: Job[TransferReply]) -> str:
    if isinstance(error, asyncio.CancelledError):
        return DeadlineExceeded.code if job.remaining_s <= DEADLINE_SLACK_S else "cancelled"
    return error.code if isinstance(error, KvrelayError) else KvrelayError.code


def chunks(begin: int, end: int, size: int) -> list[tuple[int, int]]:
    """Cut `[begin, end)` at the multiples of `size`; no chunk if it is empty."""
    if begin >= end:
        return []
    cuts = [begin, *range(begin // size * size + size, end, size), end]
    return list(zip(cuts, cuts[1:], strict=False))


def _timed(write: TogetherSink, timer: HandoffTimer) -> TogetherSink:
    def sink(first: int, states: Tensor) -> None:
        started = time.perf_counter()
        write(first, states)
        timer.write_s += time.perf_counter() - started

    return sink


def _reply(entry: CacheEntry, plan: HandoffPlan, epoch: str, timer: HandoffTimer) -> TransferReply:
    return TransferReply(
        cache_id=entry.cache_id,
        num_tokens=entry.num_tokens,
        digest=entry.digest,
        epoch=epoch,
        expires_at=entry.expires_at,
        provenance=entry.provenance,
        mapper=plan.mapper.bundle_id,
        lease_ms=timer.lease_s * 1000,
        check_ms=timer.check_s * 1000,
        open_ms=timer.open_s * 1000,
        head_ms=timer.head_s * 1000,
        copy_ms=timer.copy_s * 1000,
        map_ms=(timer.mapping_s - timer.write_s) * 1000,
        write_ms=timer.write_s * 1000,
        total_ms=timer.total_s * 1000,
        bytes=plan.source_bytes(plan.num_mapped),
        decision="hybrid" if plan.is_hybrid else "map",
        reason=plan.reason,
        reused_tokens=plan.reused,
        transport=timer.transport,
        scratch_bytes=timer.scratch_bytes,
    )
