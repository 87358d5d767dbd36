"""What is decided before a source block is read: the checks, what earlier handoffs have mapped, and the costs.

    tokens    |head|◄── mapped earlier ──►|◄──────── to map ────────►|◄── tail, always native ──►|
                                          |◄─ map ─►|◄── hybrid: ───►|
                                                      native too
    0                                  reused                       end                  source_tokens

The tail is worth most for quality. So what a handoff may cost beyond the mapping is spent on a longer tail, as long as
everything takes no more than a share of a full prefill.
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
MAX_HISTORY = 256
MAX_COMPARED_TOKENS = 2**19  # some hundredths of a second


@dataclass(frozen=True)
class HandoffPlan:
    """A checked ticket, and what is made of it: tokens `[0, head)` natively, `[head, num_tokens)` by `mapper`.

    The first `reused` tokens, head included, are in this pool already. `reason` says why the mapping ends where it
    does, `is_hybrid` that it could have gone further.
    """

    ticket: Ticket
    mapper: Mapper
    head: int
    num_tokens: int
    reused: int = 0
    is_hybrid: bool = False
    reason: str = "asked"

    @property
    def begin(self) -> int:
        """First token to map."""
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
        """Return the size of that many tokens in the source's pool."""
        layout = self.ticket.layout
        return num_tokens * block_bytes(layout) // layout.block_tokens


# -- checks -------------------------------------------------------------------------------------------------------


def plan_handoff(
    request: TransferRequest, ticket: Ticket, pool: Pool, mappers: Sequence[Mapper], *, max_tokens: int | None = None
) -> HandoffPlan:
    """Check tenant, tokens, weights, provenance and layout, and choose the mapper. `max_tokens` is the model's context.
    Raises `CacheMismatch`, `BundleUnusable`, `InvalidRequest`, `TransferFailed`."""
    _check_ticket(request, ticket)
    mapper = choose_mapper(mappers, request.mapper, ticket.fingerprint, pool.fingerprint)
    _check_layout("source cache", ticket.layout, mapper.manifest.source.geometry, mapper)
    _check_layout("pool of this worker", pool.layout, mapper.manifest.target.geometry, mapper)
    num_tokens = ticket.num_tokens if request.num_tokens is None else request.num_tokens
    if num_tokens > ticket.num_tokens:
        raise InvalidRequest(
            f"num_tokens is {num_tokens}, but {ticket.cache_id} has {ticket.num_tokens}", param="num_tokens"
        )
    limit = _max_positions(mapper, max_tokens)
    if num_tokens > limit:
        raise InvalidRequest(
            f"cannot hand over {num_tokens} tokens; this worker and bundle {mapper.bundle_id} support at most "
            f"{limit:.0f}",
            param="num_tokens",
        )
    if request.native_head >= num_tokens:
        raise InvalidRequest(
            f"native_head {request.native_head} leaves none of {num_tokens} tokens to map", param="native_head"
        )
    return HandoffPlan(ticket, mapper, request.native_head, num_tokens)


def choose_mapper(mappers: Sequence[Mapper], name: str, source_fingerprint: str, target_fingerprint: str) -> Mapper:
    """Return the first mapper between exactly these weights, with bundle id `name` unless that is auto."""
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


def _max_positions(mapper: Mapper, max_tokens: int | None) -> float:
    """Return the number of positions that the target's context allows, and for which the RoPE factors of both models
    are constant."""
    limits = (max_tokens, mapper.source_rope.limit, mapper.target_rope.limit)
    return min((limit for limit in limits if limit is not None), default=math.inf)


def _check_ticket(request: TransferRequest, ticket: Ticket) -> None:
    if ticket.cache_id != request.cache_id:
        raise TransferFailed(f"the ticket is for {ticket.cache_id}, not for {request.cache_id}")
    if request.source_model not in (None, ticket.model):
        raise CacheMismatch(
            f"{ticket.cache_id} is of model {ticket.model}, not {request.source_model}", param="source_model"
        )
    if ticket.provenance != EXACT:
        raise CacheMismatch(
            f"{ticket.cache_id} is {ticket.provenance}; the source must be exact: the errors of two maps add up, and "
            "no evaluation covers them",
            param="cache_id",
        )
    check_tokens(ticket, request.tenant_salt)


def check_tokens(ticket: Ticket, tenant_salt: str) -> None:
    """Check that the ticket is complete, and its digest that of its tokens under this tenant's salt. Raises
    `TransferFailed`, `CacheMismatch`."""
    needed = blocks_for(ticket.num_tokens, max(ticket.layout.block_tokens, 1))
    if not len(ticket.blocks) == len(ticket.generations) == needed or len(ticket.token_ids) != ticket.num_tokens:
        raise TransferFailed(
            f"the ticket has {len(ticket.blocks)} blocks, {len(ticket.generations)} generations and "
            f"{len(ticket.token_ids)} token ids; {ticket.num_tokens} tokens need {needed} blocks"
        )
    if token_digest(ticket.token_ids, tenant_salt) != ticket.digest:
        raise CacheMismatch(
            f"the digest of {ticket.cache_id} is not that of its tokens under this tenant's salt", param="tenant_salt"
        )


def _check_layout(what: str, layout: KVLayout, geometry: KVGeometry, mapper: Mapper) -> None:
    found = KVGeometry(layout.num_layers, layout.num_kv_heads, layout.head_dim)
    if found != geometry:
        raise CacheMismatch(f"the {what} has {found}; bundle {mapper.bundle_id} needs {geometry}", param="layout")


# -- earlier handoffs ---------------------------------------------------------------------------------------------


class HandoffHistory:
    """The mapped caches that handoffs have left in this pool. A longer handoff starts where an earlier one ended.

        earlier     |head|◄──── mapped ────►|◄ native ►
        now         |head|◄──────────── to map ────────────►|
                    |◄─ whole blocks, shared ─►|◄── mapped ──►|

    A conversation that continues is handed over again with the same beginning, of which the same bundle would make the
    same KV again. Only caches of handoffs are found here, by their ids, and their tokens are compared as well. It holds
    ids only: the pool evicts as usual. For use on one event loop.
    """

    def __init__(self, pool: Pool, *, max_compared_tokens: int = MAX_COMPARED_TOKENS):
        self._pool = pool
        self._max_compared_tokens = max_compared_tokens
        self._ids: OrderedDict[str, None] = OrderedDict()

    def add(self, entry: CacheEntry) -> None:
        self._ids[entry.cache_id] = None
        if len(self._ids) > MAX_HISTORY:
            self._ids.popitem(last=False)

    def longest(self, plan: HandoffPlan, salt: str) -> tuple[Hold, int]:
        """Hold the cache that shares most mapped tokens with the plan. Returns the hold and the number of shared
        tokens, head included; an empty hold and 0 if there is none."""
        best, num_shared = self._best(plan, salt)
        try:
            if best and num_shared:
                return self._pool.hold(best.cache_id, salt), num_shared
        except CacheNotFound:
            pass  # another thread has evicted it meanwhile
        return Hold((), 0, lambda blocks: None), 0

    def _best(self, plan: HandoffPlan, salt: str) -> tuple[CacheEntry | None, int]:
        """Compare the caches that can share most first, until none that is left can share more: this runs on the event
        loop."""
        token_ids, best, most, budget = plan.token_ids, None, 0, self._max_compared_tokens
        known = [entry for entry in map(self._entry, list(self._ids)) if entry and _is_alike(entry, plan, salt)]
        for entry in sorted(known, key=lambda entry: self._max_shared(entry, plan), reverse=True):
            if self._max_shared(entry, plan) <= most or budget <= 0:
                break
            common = entry.common_prefix(token_ids)
            budget -= common
            if (shared := min(self._whole_blocks(common), self._max_shared(entry, plan))) > most:
                best, most = entry, shared
        return (best, most) if most > plan.head else (None, 0)

    def _max_shared(self, entry: CacheEntry, plan: HandoffPlan) -> int:
        """Return how many tokens they share if no token differs."""
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
    """Return whether the plan would make the same KV of the same tokens."""
    same = (entry.tenant_salt, entry.provenance) == (salt, plan.provenance)
    return same and entry.mapped is not None and entry.mapped.begin == plan.head


# -- costs --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CostQuery:
    """Tokens `[head, end)` are requested, those before `reused` are mapped already. The source holds `source_tokens`,
    of which the request will prefill the rest. Everything may take `share` of a full prefill."""

    head: int
    reused: int
    end: int
    source_tokens: int
    block_tokens: int
    remaining_s: float
    share: float

    def num_to_map(self, end: int) -> int:
        return max(0, end - max(self.head, self.reused))


@dataclass(frozen=True)
class Decision:
    """Map up to `end`; `prefill` and `late` map nothing. `predicted_s` is None before anything is measured."""

    kind: Literal["map", "hybrid", "prefill", "late"]
    end: int
    reason: str
    predicted_s: float | None = None
    native_s: float | None = None


def decide(query: CostQuery, costs: Costs) -> Decision:
    """Decide by predicted cost whether to map everything, less, or nothing."""
    if not costs.are_measured:
        return Decision("map", query.end, "unmeasured")
    handoff_s, native_s = costs.handoff_s(query.num_to_map(query.end)), costs.prefill_s(0, query.end)
    if handoff_s >= native_s:
        return Decision("prefill", query.end, "prefill_cheaper", handoff_s, native_s)
    if handoff_s > query.remaining_s:
        return Decision("late", query.end, "no_time", handoff_s, native_s)
    end = _shortest_end(query, costs)
    if end < query.end:
        return Decision("hybrid", end, "time_for_a_longer_tail", costs.handoff_s(query.num_to_map(end)), native_s)
    return Decision("map", end, "cheapest", handoff_s, native_s)


def _shortest_end(query: CostQuery, costs: Costs) -> int:
    """Return the shortest mapping, in whole blocks, for which the native rest fits into the share."""
    allowed_s = query.share * costs.prefill_s(0, query.source_tokens)
    end, shortest, size = query.end, max(query.head + 1, query.reused), query.block_tokens
    for shorter in range((query.end - 1) // size * size, shortest - 1, -size):
        predicted_s = costs.handoff_s(query.num_to_map(shorter)) + costs.prefill_s(shorter, query.source_tokens)
        if predicted_s > allowed_s:
            break
        end = shorter
    return end
