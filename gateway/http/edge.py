"""The gateway's side of the HTTP edge: which configuration a request sees, who calls, and its body."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, get_type_hints

import structlog
from fastapi import Depends
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from gateway.errors import for_client
from gateway.schemas import R, parse
from gateway.snapshot import Gateway, Snapshot
from gateway.state.tenants import Tenant
from workers.api import tracing
from workers.api.errors import KvrelayError
from workers.api.http.body import read_body
from workers.api.http.edge import OPEN_PATHS, Bounds, Edge
from workers.api.http.errors import ClientDisconnected
from workers.api.http.health import READY
from workers.api.http.replies import ErrorReply, operation_id

# What the OpenAPI document says of every call that takes an API key. The check itself is `authenticate`.
API_KEY = Depends(HTTPBearer(auto_error=False, scheme_name="key", description="An API key of a tenant."))
CALLS_WITH_KEY: dict[str, Any] = {
    "dependencies": [API_KEY],
    "responses": {"default": {"model": ErrorReply, "description": "An error"}},
    "generate_unique_id_function": operation_id,
}

log = structlog.get_logger()


class GatewayEdge(Edge):
    """A request sees one `Snapshot`, as `state["snapshot"]`, from beginning to end. Its route leaves `tenant`,
    `model_label`, `tier`, `path` and `model` in the state, for the log, the metrics and the trace."""

    def __init__(self, gateway: Gateway):
        self._gateway = gateway

    @property
    def bounds(self) -> Bounds:
        limits, deadlines = self._gateway.settings.limits, self._gateway.settings.deadlines
        return Bounds(limits.max_header_bytes, limits.max_body_bytes, deadlines.body_s, deadlines.client_stall_s)

    def readiness(self) -> dict[str, Any]:
        tiers = {name: tier.is_ready for name, tier in self._gateway.parts.fleet.tiers.items()}
        if self._gateway.is_draining:
            status = "draining"
        else:
            status = READY if any(tiers.values()) else "no usable tier"
        return {"status": status, "tiers": tiers}

    def render_metrics(self) -> bytes:
        return self._gateway.metrics.render()

    def open(self, scope: Scope) -> AbstractContextManager[object]:
        snapshot = scope["state"]["snapshot"] = self._gateway.current
        return _traced(snapshot, scope) if tracing.is_on() and scope["path"] not in OPEN_PATHS else snapshot

    def visible(self, error: KvrelayError) -> KvrelayError:
        return for_client(error)

    def reply(self, error: KvrelayError) -> Response:
        reply = super().reply(error)
        if error.status == 401:
            reply.headers["www-authenticate"] = "Bearer"
        return reply

    def record(self, scope: Scope, status: int, took_ms: float) -> None:
        if scope["path"] in OPEN_PATHS:
            return
        state = scope["state"]
        self._gateway.metrics.requests.labels(state.get("model_label", "none"), status).inc()
        known = {key: state[key] for key in ("tier", "path") if key in state}
        if "tenant" in state:
            known["tenant"] = state["tenant"].name
        log.info("request", status=status, took_ms=took_ms, **known)


@contextmanager
def _traced(snapshot: Snapshot, scope: Scope) -> Iterator[None]:
    state = scope["state"]
    with snapshot, tracing.span("request", incoming=Headers(scope=scope)):
        yield
        tracing.set_attributes(
            {
                tracing.REQUEST_MODEL: state.get("model_label"),
                tracing.RESPONSE_MODEL: state.get("model"),
                tracing.PATH: state.get("path"),
            }
        )


class BodyRoute(APIRoute):
    """A route whose endpoint is `async def endpoint(body: Model, request: Request) -> Response`.

    FastAPI documents it from that signature, but would read the body before anything else. This route authenticates the
    tenant first, then reads and validates the body. It solves no dependencies.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        endpoint, model = self.endpoint, get_type_hints(self.endpoint)["body"]

        async def handle(request: Request) -> Response:
            response: Response = await endpoint(await receive(request, model), request)
            return response

        return handle


def authenticate(request: Request) -> Tenant:
    """The tenant whose key the request carries. Raises `AuthenticationFailed`."""
    snapshot: Snapshot = request.state.snapshot
    tenant = request.state.tenant = snapshot.tenants.authenticate(request.headers.get("authorization"))
    return tenant


async def receive(request: Request, model: type[R]) -> R:
    """Authenticate, count the request against the tenant's quota, then read and validate its body. Leaves the tenant
    and the time spent waiting for the body in the state, as `tenant` and `body_wait_s`.

    Raises `AuthenticationFailed`, `RateLimited`, `RequestTooSlow`, `ClientDisconnected`, and what `parse` raises.
    """
    state, snapshot = request.state, request.state.snapshot
    tenant = authenticate(request)
    await snapshot.parts.quotas.admit(tenant)
    began_at = time.monotonic()
    # A body that has arrived, as most have, needs no timer.
    timeout_s = snapshot.settings.deadlines.body_s if request.scope["state"].get("body_left", True) else None
    try:
        raw = await read_body(request.receive, timeout_s)
    except ClientDisconnected:
        request.app.state.gateway.metrics.client_disconnects.labels("body").inc()
        raise
    state.body_wait_s = time.monotonic() - began_at
    return parse(raw, model, snapshot.settings.limits)
