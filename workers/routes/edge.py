"""The worker's side of the HTTP edge: the cluster secret, its bounds, and the record of calls."""

from __future__ import annotations

import secrets
from contextlib import AbstractContextManager
from typing import Annotated, Any

import structlog
from fastapi import Depends, Request
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Scope

from workers.api import tracing
from workers.api.errors import KvrelayError, Unauthorized
from workers.api.http.edge import OPEN_PATHS, Bounds, Edge
from workers.api.http.health import READY
from workers.api.schemas import SECRET_HEADER
from workers.serving.worker import WorkerRuntime

MAX_HEADER_BYTES = 65_536
STALL_S = 30.0
SPANS = {
    "/v1/prefix/prefill": "prefill",
    "/v1/cache/transfer": "transfer",
    "/v1/chat/completions": "decode",
    "/v1/completions": "decode",
}
UNLOGGED = OPEN_PATHS | {"/v1/info"}  # called every second

NO_RETRY = (400, 404, 413, 500)  # the contract marks these too


async def _served_worker(request: Request) -> WorkerRuntime:
    worker: WorkerRuntime = request.app.state.worker
    return worker


ServedWorker = Annotated[WorkerRuntime, Depends(_served_worker)]

log = structlog.get_logger()


class WorkerEdge(Edge):
    """Lets no caller in without the cluster secret, except to health checks and metrics. Counts and logs calls by
    route; a path without a route counts as `other`."""

    reads_body = True

    def __init__(self, worker: WorkerRuntime, secret: str):
        self._worker = worker
        self._settings = worker.settings
        self._metrics = worker.metrics
        self._secret = secret.encode()

    @property
    def bounds(self) -> Bounds:
        return Bounds(MAX_HEADER_BYTES, self._settings.max_body_bytes, self._settings.body_timeout_s, STALL_S)

    def readiness(self) -> dict[str, Any]:
        return {"status": "draining" if self._worker.draining else READY}

    def render_metrics(self) -> bytes:
        return self._metrics.expose()

    def open(self, scope: Scope) -> AbstractContextManager[object]:
        path = scope["path"]
        given = dict(scope["headers"]).get(SECRET_HEADER.encode(), b"")
        if path not in OPEN_PATHS and not secrets.compare_digest(given, self._secret):
            raise Unauthorized(f"the {SECRET_HEADER} header is missing or wrong")
        name = SPANS.get(path) or ("lease" if path.endswith("/lease") else None)
        if name is None or not tracing.is_on():
            return tracing.NOTHING
        return tracing.span(name, incoming=Headers(scope=scope))

    def reply(self, error: KvrelayError) -> Response:
        reply = super().reply(error)
        if error.status in NO_RETRY:
            reply.headers["x-should-retry"] = "false"
        return reply

    def record(self, scope: Scope, status: int, took_ms: float) -> None:
        route = getattr(scope.get("route"), "path", "other")
        self._metrics.requests.labels(route, str(status)).inc()
        if route not in UNLOGGED and scope["path"] not in OPEN_PATHS:
            log.info("call", route=route, status=status, took_ms=took_ms)
