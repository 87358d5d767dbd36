"""What must hold before a source block is read: tenant, tokens, weights, provenance, layout.

What to make of a request for a handoff, by what it costs. Plain functions from values to a value.

    tokens    |head|◄── mapped before ──►|◄──────── to map ────────►|◄── tail, read natively in any case ──►|
                                         |◄─ map ─►|◄── hybrid: ───►|
                                                     read natively too
    0                                 reused                       end                                  standing

The tail is worth most for quality, so what a handoff may cost beyond the mapping goes into a longer one: as far as
everything still takes no more than a share of a full prefill.

`HandoffHistory`: the caches that handoffs have left in this pool, so that one that goes further
begins where the last ended.

    earlier     |head|◄──── mapped ────►|◄ native ►
    now         |head|◄──────────── to map ────────────►|
                |◄─ whole blocks, shared ─►|◄── mapped ──►|

A conversation that goes on is handed over again with the same beginning. What was mapped then is what the same bundle
would make of the same tokens now. Such a cache is found by its id, which the handoff that made it left here, and never
by its tokens alone; those are compared as well.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mappers.cache import KVGeometry
from mappers.mapper import Mapper
from workers.api.errors import BundleUnusable, CacheMismatch, CacheNotFound, InvalidRequest, TransferFailed
from workers.api.schemas import MAPPED, KVLayout, Ticket, TransferRequest
from workers.digest import token_digest
from workers.pool.blocks import block_bytes, blocks_for
from workers.pool.entries import EXACT, CacheEntry, Hold
from workers.pool.pool import Pool
from workers.rates import Costs

AUTO = "auto"


@dataclass(frozen=True)
class HandoffPlan:
    """A ticket that has passed all checks, and what to make of it: tokens `[0, head)` natively, `[head, num_tokens)`
    by `mapper`; of those the first `reused`, head and all, stand here already. `reason` says why so far and no
    further, `is_hybrid` that it could have gone further."""

    ticket: Ticket
    mapper: Mapper
    head: int
    num_tokens: int
    reused: int = 0
    is_hybrid: bool = False
    reason: str = "asked"

    @property
    def begin(self) -> int:
        """The first token that is mapped anew."""
        return max(self.head, self.reused)

    @property
    def num_mapped(self) -> int:
        return max(0, self.num_tokens - self.begin)

    @property
    def token_ids(self) -> list[int]:
        return self.ticket.token_ids[: self.num_tokens]

    @property
    def provenance(self) -> str:
        return MAPPED + self.mapper.bundle_id

    def source_bytes(self, num_tokens: int) -> int:
        """Bytes that so many tokens take in the source's pool."""
        layout = self.ticket.layout
        return num_tokens * block_bytes(layout) // layout.block_tokens


def plan_handoff(
    request: TransferRequest, ticket: Ticket, pool: Pool, mappers: Sequence[Mapper], *, max_tokens: int | None = None
) -> HandoffPlan:
    """Everything that must hold before a source block is read; `max_tokens` is the target's context. Raises
    `CacheMismatch`, `BundleUnusable`, `InvalidRequest`, `TransferFailed`."""
    _check_ticket(request, ticket)
    mapper = choose_mapper(mappers, request.mapper, ticket.fingerprint, pool.fingerprint)
    _check_layout("source cache", ticket.layout, mapper.manifest.source.geometry, mapper)
    _check_layout("pool of this worker", pool.layout, mapper.manifest.target.geometry, mapper)
    num_tokens = ticket.num_tokens if request.num_tokens is None else request.num_tokens
    if num_tokens > ticket.num_tokens:
        raise InvalidRequest(
            f"num_tokens {num_tokens} asked for; {ticket.cache_id} has {ticket.num_tokens}", param="num_tokens"
        )
    limit = _num_positions(mapper, max_tokens)
    if num_tokens > limit:
        raise InvalidRequest(
            f"{num_tokens} tokens are to be handed over; this worker and bundle {mapper.bundle_id} take at most "
            f"{limit:.0f}",
            param="num_tokens",
        )
    if request.native_head >= num_tokens:
        raise InvalidRequest(
            f"native_head {request.native_head} leaves none of {num_tokens} tokens to map", param="native_head"
        )
    return HandoffPlan(ticket, mapper, request.native_head, num_tokens)


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


def _num_positions(mapper: Mapper, max_tokens: int | None) -> float:
    """For so many positions from 0 on the target has a context, and both models RoPE factors that stay as they are."""
    limits = (max_tokens, mapper.source_rope.limit, mapper.target_rope.limit)
    return min((limit for limit in limits if limit is not None), default=math.inf)


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
    check_tokens(ticket, request.tenant_salt)


def check_tokens(ticket: Ticket, tenant_salt: str) -> None:
    """The ticket must be whole, and for exactly its tokens under this tenant's salt. Raises `TransferFailed`,
    `CacheMismatch`."""
    needed = blocks_for(ticket.num_tokens, max(ticket.layout.block_tokens, 1))
    if not len(ticket.blocks) == len(ticket.generations) == needed or len(ticket.token_ids) != ticket.num_tokens:
        raise TransferFailed(
            f"the ticket has {len(ticket.blocks)} blocks, {len(ticket.generations)} generations and "
            f"{len(ticket.token_ids)} token ids; {ticket.num_tokens} tokens take {needed} blocks"
        )
    if token_digest(ticket.token_ids, tenant_salt) != ticket.digest:
        raise CacheMismatch(
            f"the digest of {ticket.cache_id} is not that of its tokens under this tenant's salt", param="tenant_salt"
        )


def _check_layout(what: str, layout: KVLayout, geometry: KVGeometry, mapper: Mapper) -> None:
    found = KVGeometry(layout.num_layers, layout.num_kv_heads, layout.head_dim)
    if found != geometry:
        raise CacheMismatch(f"the {what} has {found}; bundle {mapper.bundle_id} takes {geometry}", param="layout")


@dataclass(frozen=True)
class CostQuery:
    """Tokens `[head, end)` are to be mapped, those before `reused` are mapped already; the source holds `standing`
    tokens, of which the request will read the rest natively. `share` of a full prefill is what everything may take."""

    head: int
    reused: int
    end: int
    standing: int
    block_tokens: int
    remaining_s: float
    share: float

    def to_map(self, end: int) -> int:
        return max(0, end - max(self.head, self.reused))


@dataclass(frozen=True)
class Decision:
    """Map up to `end`; for `prefill` and `late`, map nothing. `predicted_s` is None where nothing is known yet."""

    kind: Literal["map", "hybrid", "prefill", "late"]
    end: int
    reason: str
    predicted_s: float | None = None
    native_s: float | None = None


def decide(ask: CostQuery, costs: Costs) -> Decision:
    if not costs.are_measured:
        return Decision("map", ask.end, "unmeasured")
    handoff_s, native_s = costs.handoff_s(ask.to_map(ask.end)), costs.prefill_s(0, ask.end)
    if handoff_s >= native_s:
        return Decision("prefill", ask.end, "prefill_cheaper", handoff_s, native_s)
    if handoff_s > ask.remaining_s:
        return Decision("late", ask.end, "no_time", handoff_s, native_s)
    end = _shortest_end(ask, costs)
    if end < ask.end:
        return Decision("hybrid", end, "time_for_a_longer_tail", costs.handoff_s(ask.to_map(end)), native_s)
    return Decision("map", end, "cheapest", handoff_s, native_s)


def _shortest_end(ask: CostQuery, costs: Costs) -> int:
    """How far to map, so that the rest can be read natively within the share; whole blocks only."""
    allowed_s = ask.share * costs.prefill_s(0, ask.standing)
    end, least = ask.end, max(ask.head + 1, ask.reused)
    for shorter in range((ask.end - 1) // ask.block_tokens * ask.block_tokens, least - 1, -ask.block_tokens):
        if costs.handoff_s(ask.to_map(shorter)) + costs.prefill_s(shorter, ask.standing) > allowed_s:
            break
        end = shorter
    return end


MAX_KNOWN = 256
MAX_COMPARED_TOKENS = 2**19  # a few hundredths of a second


class HandoffHistory:
    """For use on one event loop. Remembers ids only; the pool evicts as it likes."""

    def __init__(self, pool: Pool, *, max_compared_tokens: int = MAX_COMPARED_TOKENS):
        self._pool = pool
        self._max_compared_tokens = max_compared_tokens
        self._ids: OrderedDict[str, None] = OrderedDict()

    def note(self, entry: CacheEntry) -> None:
        self._ids[entry.cache_id] = None
        if len(self._ids) > MAX_KNOWN:
            self._ids.popitem(last=False)

    def longest(self, plan: HandoffPlan, salt: str) -> tuple[Hold, int]:
        """The cache that shares the most mapped tokens with the plan, held, and how many, head and all. An empty hold
        if none does."""
        best, shared = self._best(plan, salt)
        try:
            if best and shared:
                return self._pool.hold(best.cache_id, salt), shared
        except CacheNotFound:
            pass  # another thread made room meanwhile
        return Hold((), 0, lambda blocks: None), 0

    def _best(self, plan: HandoffPlan, salt: str) -> tuple[CacheEntry | None, int]:
        """The one that shares most, and how many tokens. Those that can share most are compared first, until none that
        is left can share more: this runs on the event loop."""
        token_ids, best, most, left = plan.token_ids, None, 0, self._max_compared_tokens
        known = [entry for entry in map(self._entry, list(self._ids)) if entry and _is_alike(entry, plan, salt)]
        for entry in sorted(known, key=lambda entry: self._at_most(entry, plan), reverse=True):
            if self._at_most(entry, plan) <= most or left <= 0:
                break
            common = entry.common_prefix(token_ids)
            left -= common
            if (shared := min(self._whole_blocks(common), self._at_most(entry, plan))) > most:
                best, most = entry, shared
        return (best, most) if most > plan.head else (None, 0)

    def _at_most(self, entry: CacheEntry, plan: HandoffPlan) -> int:
        """How many tokens they share if none differs."""
        return self._whole_blocks(min(entry.mapped.end if entry.mapped else 0, plan.num_tokens))

    def _whole_blocks(self, num_tokens: int) -> int:
        return num_tokens - num_tokens % self._pool.layout.block_tokens

    def _entry(self, cache_id: str) -> CacheEntry | None:
        try:
            return self._pool.peek(cache_id)
        except CacheNotFound:
            del self._ids[cache_id]
            return None


def _is_alike(entry: CacheEntry, plan: HandoffPlan, salt: str) -> bool:
    """Whether its tokens, as far as they are the plan's, stand there as the plan would make them."""
    same = (entry.tenant_salt, entry.provenance) == (salt, plan.provenance)
    return same and entry.mapped is not None and entry.mapped.begin == plan.head
