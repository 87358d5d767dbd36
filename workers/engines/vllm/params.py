"""What travels with a request in `kv_transfer_params`, and what comes back in its reply.

    {"tenant_salt": "<hex>",
     "load": [{"ticket": {...}}, {"ticket": {...}, "mapper": "auto"}],   tokens [0, a) of the one, [a, b) of the other
     "publish": {"ttl_s": 10},                                           the prompt's KV is lent to who gets the reply
     "release": [{"cache_id": ..., "lease_id": ...}]}                    what an earlier reply lent is not needed now

A ticket is what a worker answers to `POST /v1/cache/{id}/lease`, and what a reply to `publish` brings.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field, ValidationError

from workers.api.errors import InvalidRequest
from workers.api.schemas import Reply, Request, TenantSalt, Ticket

MAX_PARTS = 8
MAX_RELEASES = 256


class LoadPart(Request):
    """The first `num_tokens` tokens of a lent cache (all if absent), less those that the part before it covers.
    `mapper` names a bundle, for a cache of another model."""

    ticket: Ticket
    num_tokens: int | None = Field(default=None, ge=1)
    mapper: str = "auto"


class Publish(Request):
    ttl_s: float = Field(default=10.0, gt=0, le=600)


class Lent(Request):
    cache_id: str
    lease_id: str


class TransferParams(Request):
    tenant_salt: TenantSalt
    load: list[LoadPart] = Field(default=[], max_length=MAX_PARTS)
    publish: Publish | None = None
    release: list[Lent] = Field(default=[], max_length=MAX_RELEASES)


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
