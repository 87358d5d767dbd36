"""What travels with a request in `kv_transfer_params`, and what comes back in its reply.

    {"tenant_salt": "<hex>",
     "load": [{"ticket": {...}}, {"ticket": {...}, "mapper": "auto"}],   tokens [0, a) of the one, [a, b) of the other
     "publish": {"ttl_s": 10},                                           the prompt's KV is lent to who gets the reply
     "release": [{"cache_id": ..., "lease_id": ...}]}                    what an earlier reply lent is not needed now

A ticket is what a worker answers to `POST /v1/cache/{id}/lease`, and what a reply to `publish` brings.

From the tickets of a request to what is loaded for it. Everything is checked here, before a block is allocated.

What one step of vLLM loads before its forward pass and saves after it: plain values, from the scheduler's process
to each worker's. `blocks` are the paged blocks of the sequence, from token 0 on."""

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
    """The first `num_tokens` tokens of a lent cache (all if absent), less those that the part before it covers.
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
    """`loaded_tokens` of the prompt came out of tickets, now or for an earlier request that named the same. `refused`
    says why nothing (more) did, or why nothing was published. `ticket` lends what was published."""

    loaded_tokens: int = 0
    refused: str | None = None
    ticket: Ticket | None = None


def parse(value: Any) -> TransferParams:
    """Raises `InvalidRequest` for anything else than what this page says."""
    try:
        return TransferParams.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "kv_transfer_params"
        raise InvalidRequest(f"kv_transfer_params: {where}: {first['msg']}", param="kv_transfer_params") from error


@dataclass(frozen=True)
class PromptPart:
    """Tokens `[begin, end)` of the prompt, out of the ticket's cache; through the bundle `mapper` unless it is None."""

    ticket: Ticket
    begin: int
    end: int
    mapper: str | None

    @property
    def provenance(self) -> str:
        return self.ticket.provenance if self.mapper is None else MAPPED + self.mapper


@dataclass(frozen=True)
class LoadTarget:
    """What a load goes into: our model's weights and KV are those of `pool`; `transports` are those that a step of the
    engine may wait for."""

    pool: Pool
    mappers: Callable[[], Sequence[Mapper]]
    transports: Sequence[str]
    max_tokens: int


def plan_load(params: TransferParams, prompt: Sequence[int], target: LoadTarget) -> tuple[PromptPart, ...]:
    """The parts, one behind the other from token 0 on; none if nothing is asked for.

    Raises `CacheMismatch` (tenant, tokens, layout, provenance), `BundleUnusable`, `InvalidRequest`, `TransferFailed`.
    """
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
    """What was read over these parts is, like them: exact only if all of them are."""
    return next((part.provenance for part in parts if part.provenance != EXACT), EXACT)


def isolating_salt(own: str | None, params: TransferParams, end: int) -> str:
    """The salt under which vLLM's own prefix cache keeps what is loaded so, up to token `end`: found again by whoever
    loads as much of the same caches, by the same bundles, under the same salts, and by nobody else."""
    parts = (f"{part.ticket.cache_id} {part.num_tokens} {part.mapper}" for part in params.load)
    named = ["kvrelay/loaded/3", own or "", params.tenant_salt, str(end), *parts]
    return hashlib.sha256("\0".join(named).encode()).hexdigest()


def _plan_part(asked: LoadPart, begin: int, salt: str, prompt: Sequence[int], target: LoadTarget) -> PromptPart:
    ticket = asked.ticket
    check_tokens(ticket, salt)
    if ticket.pool.kind not in target.transports:
        raise TransferFailed(
            f"a {ticket.pool.kind} pool is not read within a step of vLLM; those are: {', '.join(target.transports)}"
        )
    end = min(asked.num_tokens or ticket.num_tokens, common_prefix_len(ticket.token_ids, prompt))
    if end <= begin:
        raise CacheMismatch(
            f"{ticket.cache_id} and the prompt share {end} tokens; it was to supply those from {begin} on"
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
        deadline_ms=1,  # nothing here waits
    )
    plan = plan_handoff(request, ticket, target.pool, target.mappers(), max_tokens=target.max_tokens)
    return PromptPart(ticket, begin, end, plan.mapper.bundle_id)


def _check_geometry(ticket: Ticket, layout: KVLayout) -> None:
    found, ours = (KVGeometry(x.num_layers, x.num_kv_heads, x.head_dim) for x in (ticket.layout, layout))
    if found != ours:
        raise CacheMismatch(f"{ticket.cache_id} has {found}; this model has {ours}", param="layout")


def check_prompt(prompt: Sequence[int] | None) -> Sequence[int]:
    if prompt is None:
        raise InvalidRequest("a prompt of embeddings has no tokens to compare with a cache's")
    return prompt


@dataclass(frozen=True)
class LoadOp:
    """Tokens `[begin, end)` of the parts into the sequence's blocks, of which there may be more."""

    request_id: str
    parts: tuple[PromptPart, ...]
    begin: int
    end: int
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class SaveOp:
    """The sequence's first `num_tokens` tokens into blocks `into` of the exchange pool."""

    request_id: str
    num_tokens: int
    blocks: tuple[int, ...]
    pool: PoolExport
    into: tuple[int, ...]


@dataclass(frozen=True)
class StepWork:
    loads: tuple[LoadOp, ...] = ()
    saves: tuple[SaveOp, ...] = ()
