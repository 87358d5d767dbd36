"""What must hold before a source block is read: tenant, tokens, weights, provenance, layout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mappers.cache import KVGeometry
from mappers.mapper import Mapper
from workers.api.errors import BundleUnusable, CacheMismatch, InvalidRequest, TransferFailed
from workers.api.schemas import MAPPED, KVLayout, Ticket, TransferRequest
from workers.digest import token_digest
from workers.pool.blocks import block_bytes, blocks_for
from workers.pool.entries import EXACT
from workers.pool.pool import Pool

AUTO = "auto"


@dataclass(frozen=True)
class Plan:
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
) -> Plan:
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
