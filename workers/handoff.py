"""The handoff, seen from the target: another worker's cache, mapped into blocks of this worker's pool.

    1. ticket    lease the source cache; check tenant, tokens, weights, provenance, layout
    2. room      blocks of our own pool, and the source's pool open
    3. head      the first few tokens, read natively by our model from the ticket's token ids
    4. chunks    read the source blocks, map them layer by layer, write ours: one compute step each, so that others
                 decode in between; deadline and the source's generations are checked at each
    5. put       the new cache gets its id and is marked as mapped
    finally      our hold on the blocks goes, and the lease, whatever happened

Equal handoffs that run at once are one. Knows no HTTP: a peer is whatever leases, which `WorkerClient` and
`TicketOffice` do.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from mappers.cache import KVCache, KVGeometry
from mappers.mapper import Mapper
from workers.api.errors import BundleUnusable, CacheMismatch, InvalidRequest, KvrelayError, TransferFailed
from workers.api.schemas import KVLayout, LeaseRequest, Ticket, TransferReply, TransferRequest
from workers.digest import token_digest
from workers.pool.blocks import block_bytes, blocks_for
from workers.pool.entries import EXACT, CacheEntry, Hold, Span
from workers.pool.pool import Pool
from workers.sharing import Job, SharedWork
from workers.transports import choose
from workers.transports.base import Reader
from workers.transports.readers import Readers

log = logging.getLogger(__name__)

AUTO = "auto"
CHUNK_TOKENS = 512
MAX_HANDOFFS = 16
LEASE_MARGIN_S = 5.0  # a lease outlives the first caller's deadline by this much; a more patient one may join
MAX_LEASE_S = 600.0
RELEASE_TIMEOUT_S = 1.0


class Peer(Protocol):
    """The two calls of the source worker that a handoff makes."""

    async def lease(self, cache_id: str, request: LeaseRequest, *, timeout_s: float) -> Ticket: ...

    async def release(self, cache_id: str, lease_id: str, *, timeout_s: float = 2.0) -> None: ...


class RunStep(Protocol):
    """Runs one bounded step of work off the event loop, among the steps of other requests.

    When the awaiting task is cancelled, a step that has not begun never runs, and one that runs is waited for before
    the cancellation goes on: its memory may be freed then. `Compute.run` does this.
    """

    def __call__(self, step: Callable[[], Any], /) -> Awaitable[Any]: ...


# Reads the first tokens of a prompt natively: their KV from position 0, in tensors that nobody else writes to.
PrefillHead = Callable[[Sequence[int]], Awaitable[KVCache]]


@dataclass(frozen=True)
class Outcome:
    """How one handoff ended, whoever waited for it: `result` is `ok`, an error's code, or `cancelled`; `reply` is there
    if it is `ok`. `num_mapped` counts the tokens that went through the mapper."""

    result: str
    seconds: float
    num_mapped: int = 0
    reply: TransferReply | None = None

    @property
    def mapping_s(self) -> float:
        """What the mapped tokens cost: reading the source, mapping, writing."""
        return (self.reply.copy_ms + self.reply.map_ms + self.reply.write_ms) / 1000 if self.reply else 0.0


@dataclass(frozen=True)
class HandoffTarget:
    """What the receiving worker lends to its handoffs. `mappers` gives those usable at the moment of the call,
    `transports` names those that it reads. `observe` hears of each handoff once."""

    pool: Pool
    model: str
    mappers: Callable[[], Sequence[Mapper]]
    prefill_head: PrefillHead
    run_step: RunStep
    readers: Readers
    transports: Sequence[str]
    observe: Callable[[Outcome], None] = lambda outcome: None
    chunk_tokens: int = CHUNK_TOKENS
    max_handoffs: int = MAX_HANDOFFS


@dataclass(frozen=True)
class Plan:
    """A ticket that has passed all checks, and what to make of it: tokens `[0, head)` natively, `[head, num_tokens)`
    by `mapper`."""

    ticket: Ticket
    mapper: Mapper
    head: int
    num_tokens: int

    @property
    def token_ids(self) -> list[int]:
        return self.ticket.token_ids[: self.num_tokens]

    @property
    def provenance(self) -> str:
        return f"mapped:{self.mapper.bundle_id}"

    @property
    def source_bytes(self) -> int:
        """Bytes read from the source's pool."""
        layout = self.ticket.layout
        return (self.num_tokens - self.head) * block_bytes(layout) // layout.block_tokens


@dataclass
class Clock:
    """Seconds spent in the parts of one handoff. Mapping and writing interleave; `mapping_s` holds both."""

    started: float = field(default_factory=time.perf_counter)
    lease_s: float = 0.0
    head_s: float = 0.0
    open_s: float = 0.0
    copy_s: float = 0.0
    mapping_s: float = 0.0
    write_s: float = 0.0

    @property
    def total_s(self) -> float:
        return time.perf_counter() - self.started


class Handoffs:
    """The handoffs into one worker. For use on one event loop."""

    def __init__(self, target: HandoffTarget):
        self._target = target
        self._work: SharedWork[TransferReply] = SharedWork(max_jobs=target.max_handoffs)
        self._releases: set[asyncio.Task[None]] = set()

    async def transfer(self, request: TransferRequest, *, peer: Peer) -> TransferReply:
        """Bring a cache of `peer` over. `peer` is the client of `request.source_worker`.

        Raises `CacheNotFound`, `CacheStale`, `CacheMismatch` (tenant, tokens, layout, provenance), `BundleUnusable`,
        `InvalidRequest`, `Overloaded` (also when our pool is full), `DeadlineExceeded`, `TransferFailed`,
        `WorkerUnavailable`. Nothing of it stays behind then, nor when the caller is cancelled.
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

    async def _observed(self, request: TransferRequest, peer: Peer, job: Job[TransferReply]) -> TransferReply:
        clock = Clock()
        try:
            plan, reply = await self._hand_over(request, peer, job, clock)
        except (KvrelayError, asyncio.CancelledError) as error:
            result = error.code if isinstance(error, KvrelayError) else "cancelled"
            self._target.observe(Outcome(result, clock.total_s))
            raise
        self._target.observe(Outcome("ok", clock.total_s, plan.num_tokens - plan.head, reply))
        return reply

    async def _hand_over(
        self, request: TransferRequest, peer: Peer, job: Job[TransferReply], clock: Clock
    ) -> tuple[Plan, TransferReply]:
        ticket = await self._lease(request, peer, job)
        clock.lease_s = clock.total_s
        try:
            plan = plan_handoff(request, ticket, self._target)
            entry = await self._bring(plan, request, job, clock)
        finally:
            self._give_back(peer, ticket)
        return plan, _reply(entry, plan, self._target.pool.epoch, clock)

    async def _lease(self, request: TransferRequest, peer: Peer, job: Job[TransferReply]) -> Ticket:
        """A ticket that lasts as long as this handoff may. One that is granted and never arrives expires by itself."""
        job.check()
        ttl_s = min(job.remaining_s + LEASE_MARGIN_S, MAX_LEASE_S)
        lease = LeaseRequest(ttl_s=ttl_s, tenant_salt=request.tenant_salt)
        return await peer.lease(request.cache_id, lease, timeout_s=job.remaining_s)

    async def _bring(
        self, plan: Plan, request: TransferRequest, job: Job[TransferReply], clock: Clock
    ) -> CacheEntry:
        pool, run_step = self._target.pool, self._target.run_step
        with ExitStack() as held:
            # Entered inside the steps: a result of a step that ends under cancellation would be lost with its hold.
            ours: list[Hold] = []
            readers: list[Reader] = []
            needed = blocks_for(plan.num_tokens, pool.layout.block_tokens)
            await run_step(lambda: ours.append(held.enter_context(pool.allocate(needed))))
            await run_step(lambda: readers.append(self._open(plan.ticket, request.source_worker, clock)))
            blocks, reader = ours[0].blocks, readers[0]
            if plan.head:
                job.check()
                await self._read_head(plan, blocks, clock)
            for begin, end in chunks(plan.head, plan.num_tokens, self._target.chunk_tokens):
                job.check()
                await run_step(partial(self._move, plan, reader, blocks, begin, end, clock))
            return pool.put(
                blocks,
                plan.token_ids,
                request.tenant_salt,
                ttl_s=request.ttl_s,
                provenance=plan.provenance,
                mapped=Span(plan.head, plan.num_tokens),
            )

    def _open(self, ticket: Ticket, peer_name: str, clock: Clock) -> Reader:
        started = time.perf_counter()
        choose([ticket.pool.kind], self._target.transports)
        reader = self._target.readers.get(peer_name, ticket.pool, ticket.layout)
        clock.open_s = time.perf_counter() - started
        return reader

    async def _read_head(self, plan: Plan, blocks: Sequence[int], clock: Clock) -> None:
        started = time.perf_counter()
        kv = await self._target.prefill_head(plan.token_ids[: plan.head])
        if (kv.start, kv.num_tokens) != (0, plan.head):
            raise TransferFailed(f"the engine read {kv.num_tokens} tokens from {kv.start}, asked for [0, {plan.head})")
        await self._target.run_step(lambda: self._target.pool.scatter(blocks, kv))
        clock.head_s = time.perf_counter() - started

    def _move(self, plan: Plan, reader: Reader, blocks: Sequence[int], begin: int, end: int, clock: Clock) -> None:
        """One chunk, from the source's blocks to ours. Runs on the compute thread."""
        started = time.perf_counter()
        chunk = reader.read(plan.ticket.blocks, plan.ticket.generations, begin, end)
        clock.copy_s += (copied := time.perf_counter()) - started
        with self._target.pool.writing(blocks, begin, end) as write:
            plan.mapper.map_into(chunk, _timed(write, clock))
        clock.mapping_s += time.perf_counter() - copied

    def _give_back(self, peer: Peer, ticket: Ticket) -> None:
        """End the lease without waiting for it: the peer may be frozen, and its leases expire."""
        release = asyncio.create_task(_release(peer, ticket))
        self._releases.add(release)
        release.add_done_callback(self._releases.discard)


def plan_handoff(request: TransferRequest, ticket: Ticket, target: HandoffTarget) -> Plan:
    """Everything that must hold before a source block is read. Raises `CacheMismatch`, `BundleUnusable`,
    `InvalidRequest`, `TransferFailed`."""
    _check_ticket(request, ticket)
    mapper = choose_mapper(target.mappers(), request.mapper, ticket.fingerprint, target.pool.fingerprint)
    _check_layout("source cache", ticket.layout, mapper.manifest.source.geometry, mapper)
    _check_layout("pool of this worker", target.pool.layout, mapper.manifest.target.geometry, mapper)
    num_tokens = ticket.num_tokens if request.num_tokens is None else request.num_tokens
    if num_tokens > ticket.num_tokens:
        raise InvalidRequest(
            f"num_tokens {num_tokens} asked for; {ticket.cache_id} has {ticket.num_tokens}", param="num_tokens"
        )
    if request.native_head >= num_tokens:
        raise InvalidRequest(
            f"native_head {request.native_head} leaves none of {num_tokens} tokens to map", param="native_head"
        )
    return Plan(ticket, mapper, request.native_head, num_tokens)


def choose_mapper(
    mappers: Sequence[Mapper], name: str, source_fingerprint: str, target_fingerprint: str
) -> Mapper:
    """The first mapper between exactly these weights; of that bundle id, unless `name` is auto."""
    for mapper in mappers:
        manifest = mapper.manifest
        between = (manifest.source.fingerprint, manifest.target.fingerprint)
        if between == (source_fingerprint, target_fingerprint) and name in (AUTO, mapper.bundle_id):
            return mapper
    known = ", ".join(f"{m.bundle_id} from {m.manifest.source.fingerprint[:12]}" for m in mappers)
    raise BundleUnusable(
        f"no usable bundle {name!r} from weights {source_fingerprint[:12]}; this worker uses: {known or 'none'}",
        param="mapper",
    )


def chunks(begin: int, end: int, size: int) -> list[tuple[int, int]]:
    """`[begin, end)` cut at the multiples of `size`."""
    cuts = [begin, *range(begin // size * size + size, end, size), end]
    return list(zip(cuts, cuts[1:], strict=False))


def _check_ticket(request: TransferRequest, ticket: Ticket) -> None:
    if ticket.cache_id != request.cache_id:
        raise TransferFailed(f"the ticket is for {ticket.cache_id}; asked for {request.cache_id}")
    if request.source_model not in (None, ticket.model):
        raise CacheMismatch(
            f"{ticket.cache_id} is of model {ticket.model}, not {request.source_model}", param="source_model"
        )
    if ticket.provenance != EXACT:
        raise CacheMismatch(
            f"{ticket.cache_id} is {ticket.provenance} and is not mapped again: errors of two maps add up, and no "
            "evaluation covers them; a source must be exact",
            param="cache_id",
        )
    needed = blocks_for(ticket.num_tokens, max(ticket.layout.block_tokens, 1))
    if not len(ticket.blocks) == len(ticket.generations) == needed or len(ticket.token_ids) != ticket.num_tokens:
        raise TransferFailed(
            f"the ticket has {len(ticket.blocks)} blocks, {len(ticket.generations)} generations and "
            f"{len(ticket.token_ids)} token ids; {ticket.num_tokens} tokens take {needed} blocks"
        )
    if token_digest(ticket.token_ids, request.tenant_salt) != ticket.digest:
        raise CacheMismatch(
            f"the digest of {ticket.cache_id} is not that of its tokens under this tenant's salt", param="tenant_salt"
        )


def _check_layout(what: str, layout: KVLayout, geometry: KVGeometry, mapper: Mapper) -> None:
    found = KVGeometry(layout.num_layers, layout.num_kv_heads, layout.head_dim)
    if found != geometry:
        raise CacheMismatch(f"the {what} has {found}; bundle {mapper.bundle_id} takes {geometry}", param="layout")


def _timed(write: Callable[[int, Tensor, Tensor], None], clock: Clock) -> Callable[[int, Tensor, Tensor], None]:
    def sink(layer: int, keys: Tensor, values: Tensor) -> None:
        started = time.perf_counter()
        write(layer, keys, values)
        clock.write_s += time.perf_counter() - started

    return sink


async def _release(peer: Peer, ticket: Ticket) -> None:
    try:
        async with asyncio.timeout(RELEASE_TIMEOUT_S):
            await peer.release(ticket.cache_id, ticket.lease_id, timeout_s=RELEASE_TIMEOUT_S)
    except (KvrelayError, TimeoutError) as error:
        log.info("a lease was not given back and will expire: %s", error)


def _reply(entry: CacheEntry, plan: Plan, epoch: str, clock: Clock) -> TransferReply:
    return TransferReply(
        cache_id=entry.cache_id,
        num_tokens=entry.num_tokens,
        digest=entry.digest,
        epoch=epoch,
        expires_at=entry.expires_at,
        provenance=entry.provenance,
        mapper=plan.mapper.bundle_id,
        lease_ms=clock.lease_s * 1000,
        open_ms=clock.open_s * 1000,
        head_ms=clock.head_s * 1000,
        copy_ms=clock.copy_s * 1000,
        map_ms=(clock.mapping_s - clock.write_s) * 1000,
        write_ms=clock.write_s * 1000,
        total_ms=clock.total_s * 1000,
        bytes=plan.source_bytes,
    )
