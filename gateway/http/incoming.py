"""A request taken in: who asks, and what for. Nobody's body is read before it is known whose it is."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Generic

from starlette.requests import Request

from gateway.connection import read_body, read_whole
from gateway.errors import ClientDisconnected
from gateway.schemas import R, parse
from gateway.snapshot import Snapshot
from gateway.state.tenants import Tenant


@dataclass(frozen=True)
class Incoming(Generic[R]):
    """`waited_s` went by until the body was there."""

    tenant: Tenant
    asked: R
    waited_s: float


async def take_in(request: Request, kind: type[R]) -> Incoming[R]:
    """Counts against the tenant's minute. Raises `AuthenticationFailed`, `RateLimited`, `RequestTooSlow`,
    `ClientDisconnected`, and what `parse` raises."""
    snapshot: Snapshot = request.state.snapshot
    settings = snapshot.settings
    tenant = snapshot.tenants.authenticate(request.headers.get("authorization"))
    request.state.tenant = tenant.name
    await snapshot.parts.quotas.admit(tenant)
    reading_at = time.monotonic()
    try:
        # A body that is there already, as most are, needs no timer.
        is_there = not request.scope["state"].get("body_left", True)
        raw = await (read_whole(request.receive) if is_there else read_body(request.receive, settings.deadlines.body_s))
    except ClientDisconnected:
        request.app.state.gateway.metrics.client_disconnects.labels("body").inc()
        raise
    waited_s = time.monotonic() - reading_at
    return Incoming(tenant, parse(raw, kind, settings.limits), waited_s)
