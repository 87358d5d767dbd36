"""The move.

    1. ticket    lease the source cache; check tenant, tokens, weights, provenance, layout
    2. decide    what stands here mapped already is shared; by cost, map less than asked, or not at all
    3. room      blocks of our own pool, and the source's pool open, by the fastest transport that works
    4. head      the first few tokens, read natively by our model from the ticket's token ids
    5. chunks    from the source's blocks to ours, a layer as it is or by the map: one compute step each, so that others
                 decode in between; deadline and the source's generations are checked at each
    6. put       if its bundle is still used, the new cache gets its id and is marked as mapped
    finally      our hold on the blocks goes, and the lease, whatever happened

Equal handoffs that run at once are one.
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

LEASE_MARGIN_S = 5.0  # a lease outlives the first caller's deadline by this much; a more patient one may join
MAX_LEASE_S = 600.0
LATE_S = 0.1  # who asked counts from before we heard of it: at the same deadline, it gives up by so much earlier
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
    """The handoffs into one worker. For use on one event loop."""

    def __init__(self, target: HandoffTarget):
        self._target = target
        self._made = HandoffHistory(target.pool)
        self._work: SharedWork[TransferReply] = SharedWork(max_jobs=target.max_handoffs)
        self._releases: set[asyncio.Task[None]] = set()

    async def transfer(self, request: TransferRequest, *, peer: SourcePeer) -> TransferReply:
        """Bring a cache of `peer` over. `peer` is the client of `request.source_worker`.

        Raises `CacheNotFound`, `CacheStale`, `CacheMismatch` (tenant, tokens, layout, provenance), `BundleUnusable`,
        `InvalidRequest`, `Overloaded` (also when our pool is full), `DeadlineExceeded`, `TransferFailed`,
        `WorkerUnavailable`, and with `by_cost` `PrefillCheaper` and `NoTime`. Nothing of it stays behind then, nor
        when the caller is cancelled.
        """
        if request.target_model not in (None, self._target.model):
            raise InvalidRequest(
                f"unknown model {request.target_model!r}; this worker has {self._target.model}", param="target_model"
            )
        key = tuple(request.model_dump(exclude={"deadline_ms"}).values())
        deadline = time.monotonic() + request.deadline_ms / 1000
        return await self._work.run(key, deadline, lambda job: self._observed(request, peer, job))

    async def aclose(self) -> None:
        """Stop what runs; wait until it is cleaned up and the leases are given back."""
        await self._work.aclose()
        if self._releases:
            await asyncio.wait(self._releases)

    async def _observed(self, request: TransferRequest, peer: SourcePeer, job: Job[TransferReply]) -> TransferReply:
        clock = HandoffTimer()
        try:
            plan, reply = await self._hand_over(request, peer, job, clock)
        except (Exception, asyncio.CancelledError) as error:
            self._target.observe(HandoffResult(_result_of(error, job), clock.total_s))
            raise
        self._target.observe(HandoffResult("ok", clock.total_s, plan.num_mapped, reply))
        return reply

    async def _hand_over(
        self, request: TransferRequest, peer: SourcePeer, job: Job[TransferReply], clock: HandoffTimer
    ) -> tuple[HandoffPlan, TransferReply]:
        ticket = await self._lease(request, peer, job)
        clock.lease_s = clock.total_s
        is_done = False
        try:
            plan = plan_handoff(
                request, ticket, self._target.pool, self._target.mappers(), max_tokens=self._target.max_tokens
            )
            before, reused = self._made.longest(plan, request.tenant_salt)
            with before:
                plan = self._decided(replace(plan, reused=reused), request, job)
                clock.check_s = clock.total_s - clock.lease_s
                entry = await self._bring(plan, before.blocks, request, job, clock)
            is_done = True
        finally:
            self._give_back(peer, ticket, is_done=is_done)
        return plan, _reply(entry, plan, self._target.pool.epoch, clock)

    async def _lease(self, request: TransferRequest, peer: SourcePeer, job: Job[TransferReply]) -> Ticket:
        """A ticket that lasts as long as this handoff may. One that is granted and never arrives expires by itself."""
        job.check()
        ttl_s = min(job.remaining_s + LEASE_MARGIN_S, MAX_LEASE_S)
        lease = LeaseRequest(ttl_s=ttl_s, tenant_salt=request.tenant_salt)
        return await peer.lease(request.cache_id, lease, timeout_s=job.remaining_s)

    def _decided(self, plan: HandoffPlan, request: TransferRequest, job: Job[TransferReply]) -> HandoffPlan:
        """The plan as its costs allow. Raises `PrefillCheaper`, `NoTime`."""
        if not request.by_cost:
            return plan
        target = self._target
        ask = CostQuery(
            head=plan.head,
            reused=plan.reused,
            end=plan.num_tokens,
            standing=plan.ticket.num_tokens,
            block_tokens=target.pool.layout.block_tokens,
            remaining_s=job.remaining_s,
            share=target.native_share,
        )
        decision = decide(ask, target.costs())
        told = f"{decision.predicted_s or 0:.3f} s to hand {plan.num_tokens} tokens over"
        if decision.kind == "prefill":
            raise PrefillCheaper(f"{told}, {decision.native_s or 0:.3f} s to read them: read them")
        if decision.kind == "late":
            raise NoTime(f"{told} are predicted, {job.remaining_s:.3f} s are left")
        return replace(plan, num_tokens=decision.end, is_hybrid=decision.kind == "hybrid", reason=decision.reason)

    async def _bring(
        self,
        plan: HandoffPlan,
        before: Sequence[int],
        request: TransferRequest,
        job: Job[TransferReply],
        clock: HandoffTimer,
    ) -> CacheEntry:
        pool, run_step, size = self._target.pool, self._target.run_step, self._target.pool.layout.block_tokens
        shared = tuple(before[: plan.reused // size])
        with ExitStack() as held:
            # Entered inside the steps: a result of a step that ends under cancellation would be lost with its hold.
            ours: list[Hold] = []
            needed, whole = blocks_for(plan.num_tokens, size) - len(shared), plan.num_tokens // size - len(shared)
            room = partial(pool.allocate, needed, evict=not self._target.is_trial, num_overwritten=whole)
            await run_step(lambda: ours.append(held.enter_context(room())))
            source = await self._open(plan.ticket, request.source_worker, job, clock)
            blocks = shared + ours[0].blocks
            if plan.head and not shared:
                job.check()
                await self._read_head(plan, request.tenant_salt, blocks, clock)
            for begin, end in chunks(plan.begin, plan.num_tokens, self._target.chunk_tokens):
                job.check()
                await source.use(begin, end, partial(self._map, plan, blocks, clock))
            clock.copy_s += source.copy_s
            clock.scratch_bytes += source.copy_bytes
            clock.transport = source.kind
            self._check_still_used(plan)
            entry = pool.put(
                blocks,
                plan.token_ids,
                request.tenant_salt,
                ttl_s=request.ttl_s,
                provenance=plan.provenance,
                mapped=Span(plan.head, plan.num_tokens),
                is_hybrid=plan.is_hybrid,
                allow_barred=self._target.is_trial,
            )
        self._made.note(entry)
        return entry

    def _check_still_used(self, plan: HandoffPlan) -> None:
        """Its bundle may have been switched off meanwhile, and what it had made dropped."""
        if plan.mapper not in self._target.mappers():
            raise BundleUnusable(f"bundle {plan.mapper.bundle_id} was switched off meanwhile", param="mapper")

    async def _open(self, ticket: Ticket, peer_name: str, job: Job[TransferReply], clock: HandoffTimer) -> SourceReader:
        started = time.perf_counter()
        source = SourceReader(self._target, peer_name, ticket, job)
        await source.open()
        clock.open_s = time.perf_counter() - started
        return source

    async def _read_head(self, plan: HandoffPlan, salt: str, blocks: Sequence[int], clock: HandoffTimer) -> None:
        started = time.perf_counter()
        kv = await self._target.prefill_head(plan.token_ids[: plan.head], salt)
        if (kv.start, kv.num_tokens) != (0, plan.head):
            raise TransferFailed(f"the engine read {kv.num_tokens} tokens from {kv.start}, asked for [0, {plan.head})")
        await self._target.run_step(lambda: self._target.pool.scatter(blocks, kv))
        clock.head_s = time.perf_counter() - started

    def _map(self, plan: HandoffPlan, blocks: Sequence[int], clock: HandoffTimer, span: BlockSpan) -> None:
        """One chunk of the source into our blocks: copies from block to block, the other layers by the map. Runs on the
        compute thread."""
        mapper = plan.mapper
        with self._target.pool.writing(blocks, span.start, span.start + span.num_tokens) as writer:
            started = time.perf_counter()
            writer.copy(span, mapper.manifest.copies)
            copied = time.perf_counter()
            mapper.map_together(span, _timed(writer.write, clock), copies=False)
            mapped = time.perf_counter()
        clock.copy_s += copied - started
        clock.mapping_s += mapped - copied
        clock.scratch_bytes = max(clock.scratch_bytes, span.scratch_bytes + mapper.scratch_bytes)

    def _give_back(self, peer: SourcePeer, ticket: Ticket, *, is_done: bool) -> None:
        """End the lease without waiting for it: the peer may be frozen, and its leases expire. Where a source is to be
        released, its cache goes as well."""
        release = asyncio.create_task(self._release(peer, ticket, drop=is_done and self._target.release_source))
        self._releases.add(release)
        release.add_done_callback(self._releases.discard)

    async def _release(self, peer: SourcePeer, ticket: Ticket, *, drop: bool) -> None:
        try:
            async with asyncio.timeout(RELEASE_TIMEOUT_S):
                await peer.release(ticket.cache_id, ticket.lease_id, timeout_s=RELEASE_TIMEOUT_S)
                if drop:
                    await peer.drop(ticket.cache_id, timeout_s=RELEASE_TIMEOUT_S)
                    self._target.source_released()
        except (KvrelayError, TimeoutError) as error:
            log.info("a source was not given back and will expire: %s", error)


def _result_of(error: BaseException, job: Job[TransferReply]) -> str:
    if isinstance(error, asyncio.CancelledError):
        return DeadlineExceeded.code if job.remaining_s <= LATE_S else "cancelled"
    return error.code if isinstance(error, KvrelayError) else KvrelayError.code


def chunks(begin: int, end: int, size: int) -> list[tuple[int, int]]:
    """`[begin, end)` cut at the multiples of `size`; no chunk if it is empty."""
    if begin >= end:
        return []
    cuts = [begin, *range(begin // size * size + size, end, size), end]
    return list(zip(cuts, cuts[1:], strict=False))


def _timed(write: TogetherSink, clock: HandoffTimer) -> TogetherSink:
    def sink(first: int, states: Tensor) -> None:
        started = time.perf_counter()
        write(first, states)
        clock.write_s += time.perf_counter() - started

    return sink


def _reply(entry: CacheEntry, plan: HandoffPlan, epoch: str, clock: HandoffTimer) -> TransferReply:
    return TransferReply(
        cache_id=entry.cache_id,
        num_tokens=entry.num_tokens,
        digest=entry.digest,
        epoch=epoch,
        expires_at=entry.expires_at,
        provenance=entry.provenance,
        mapper=plan.mapper.bundle_id,
        lease_ms=clock.lease_s * 1000,
        check_ms=clock.check_s * 1000,
        open_ms=clock.open_s * 1000,
        head_ms=clock.head_s * 1000,
        copy_ms=clock.copy_s * 1000,
        map_ms=(clock.mapping_s - clock.write_s) * 1000,
        write_ms=clock.write_s * 1000,
        total_ms=clock.total_s * 1000,
        bytes=plan.source_bytes(plan.num_mapped),
        decision="hybrid" if plan.is_hybrid else "map",
        reason=plan.reason,
        reused_tokens=plan.reused,
        transport=clock.transport,
        scratch_bytes=clock.scratch_bytes,
    )
