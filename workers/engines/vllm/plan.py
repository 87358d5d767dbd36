"""What a request asks of the connector, what is loaded for it, and what one step does.

A request's `kv_transfer_params`, checked as `TransferParams`:

    {"tenant_salt": "<hex>",
     "load": [{"ticket": {...}}, {"ticket": {...}, "mapper": "auto"}],   tokens [0, a) of one, [a, b) of the next
     "publish": {"ttl_s": 10},                                           lease the prompt's KV to the caller
     "release": [{"cache_id": ..., "lease_id": ...}]}                    end leases of earlier replies

A ticket is a worker's reply to `POST /v1/cache/{id}/lease`, or part of a reply to `publish`. Everything is checked
here, before a block is allocated. The values for one step travel from the scheduler's process to each worker's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import Field, ValidationError

from mappers.cache import KVGeometry
from mappers.mapper import Mapper
from workers.api.errors import CacheMismatch, InvalidRequest, TransferFailed
from workers.api.schemas import MAPPED, KVLayout, PoolExport, Reply, Request, TenantSalt, Ticket, TransferRequest
from workers.digest import common_prefix_len
from workers.engines.base import MIN_LOADED_TOKENS
from workers.handoff.plan import check_tokens, plan_handoff
from workers.pool.entries import EXACT
from workers.pool.pool import Pool

MAX_PARTS = 8
MAX_RELEASES = 256


class LoadPart(Request):
    """The first `num_tokens` tokens of a leased cache (all by default), less those covered by the part before.
    `mapper` names a bundle, for a cache of another model."""

    ticket: Ticket
    num_tokens: int | None = Field(default=None, ge=1)
    mapper: str = "auto"


class PublishParams(Request):
    ttl_s: float = Field(default=10.0, gt=0, le=600)


class LeaseRef(Request):
    cache_id: str
    lease_id: str


class TransferParams(Request):
    tenant_salt: TenantSalt
    load: list[LoadPart] = Field(default=[], max_length=MAX_PARTS)
    publish: PublishParams | None = None
    release: list[LeaseRef] = Field(default=[], max_length=MAX_RELEASES)


class TransferReport(Reply):
    """`loaded_tokens` of the prompt came from tickets, now or for an earlier request with the same ones. `refused` says
    why no more were loaded, or why nothing was published. `ticket` leases what was published."""

    loaded_tokens: int = 0
    refused: str | None = None
    ticket: Ticket | None = None


def parse_params(value: Any) -> TransferParams:
    """Validate `kv_transfer_params`. Raises `InvalidRequest`."""
    try:
        return TransferParams.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "kv_transfer_params"
        raise InvalidRequest(f"kv_transfer_params: {where}: {first['msg']}", param="kv_transfer_params") from error


# -- planning a load ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PromptPart:
    """Tokens `[begin, end)` of the prompt from the ticket's cache, mapped by the bundle `mapper` unless it is None."""

    ticket: Ticket
    begin: int
    end: int
    mapper: str | None

    @property
    def provenance(self) -> str:
        return self.ticket.provenance if self.mapper is None else MAPPED + self.mapper


@dataclass(frozen=True)
class LoadTarget:
    """The model that loads: `pool` has its weights' fingerprint and KV layout. `transports` are those that a step may
    wait for."""

    pool: Pool
    mappers: Callable[[], Sequence[Mapper]]
    transports: Sequence[str]
    max_tokens: int


def plan_load(params: TransferParams, prompt: Sequence[int] | None, target: LoadTarget) -> tuple[PromptPart, ...]:
    """Return the contiguous parts to load from token 0 on; empty if none is asked for.

    Raises `CacheMismatch` (tenant, tokens, layout, provenance), `BundleUnusable`, `InvalidRequest`, `TransferFailed`.
    """
    if prompt is None:
        raise InvalidRequest("a prompt of embeddings has no tokens to compare with a cache's")
    parts: list[PromptPart] = []
    for asked in params.load:
        begin = parts[-1].end if parts else 0
        parts.append(_plan_part(asked, begin, params.tenant_salt, prompt, target))
    if parts and parts[-1].end < MIN_LOADED_TOKENS:
        raise CacheMismatch(
            f"the tickets cover {parts[-1].end} tokens of the prompt; at least {MIN_LOADED_TOKENS} are needed"
        )
    return tuple(parts)


def provenance_of(parts: Sequence[PromptPart]) -> str:
    """Return the provenance of KV computed over these parts: exact only if all of them are."""
    return next((part.provenance for part in parts if part.provenance != EXACT), EXACT)


def isolating_salt(own: str | None, params: TransferParams, end: int) -> str:
    """Return the salt for loaded blocks, up to token `end`, in vLLM's prefix cache. Only a request that loads as much
    of the same caches, by the same bundles, under the same salts gets the same one."""
    parts = (f"{part.ticket.cache_id} {part.num_tokens} {part.mapper}" for part in params.load)
    named = ["kvrelay/loaded/3", own or "", params.tenant_salt, str(end), *parts]
    return hashlib.sha256("\0".join(named).encode()).hexdigest()


def _plan_part(asked: LoadPart, begin: int, salt: str, prompt: Sequence[int], target: LoadTarget) -> PromptPart:
    ticket = asked.ticket
    check_tokens(ticket, salt)
    if ticket.pool.kind not in target.transports:
        raise TransferFailed(
            f"a {ticket.pool.kind} pool cannot be read within a step of vLLM; allowed: {', '.join(target.transports)}"
        )
    end = min(asked.num_tokens or ticket.num_tokens, common_prefix_len(ticket.token_ids, prompt))
    if end <= begin:
        raise CacheMismatch(
            f"{ticket.cache_id} and the prompt share {end} tokens; this part must supply those from {begin} on"
        )
    if ticket.fingerprint == target.pool.fingerprint:
        _check_geometry(ticket, target.pool.layout)
        return PromptPart(ticket, begin, end, None)
    request = TransferRequest(
        cache_id=ticket.cache_id,
        source_worker=ticket.model,
        mapper=asked.mapper,
        num_tokens=end,
        native_head=begin,
        tenant_salt=salt,
        deadline_ms=1,  # unused: planning waits for nothing
    )
    plan = plan_handoff(request, ticket, target.pool, target.mappers(), max_tokens=target.max_tokens)
    return PromptPart(ticket, begin, end, plan.mapper.bundle_id)


def _check_geometry(ticket: Ticket, layout: KVLayout) -> None:
    theirs, ours = (KVGeometry(x.num_layers, x.num_kv_heads, x.head_dim) for x in (ticket.layout, layout))
    if theirs != ours:
        raise CacheMismatch(f"{ticket.cache_id} has {theirs}; this model has {ours}", param="layout")


# -- one step; `blocks` are the sequence's paged blocks from token 0 on ---------------------------------------------


@dataclass(frozen=True)
class LoadOp:
    """Before the forward pass, load tokens `[begin, end)` of the parts into the sequence's blocks."""

    request_id: str
    parts: tuple[PromptPart, ...]
    begin: int
    end: int
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class SaveOp:
    """After the forward pass, copy the sequence's first `num_tokens` tokens into blocks `into` of the exchange pool."""

    request_id: str
    num_tokens: int
    blocks: tuple[int, ...]
    pool: PoolExport
    into: tuple[int, ...]


@dataclass(frozen=True)
class StepWork:
    loads: tuple[LoadOp, ...] = ()
    saves: tuple[SaveOp, ...] = ()
