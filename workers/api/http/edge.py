"""`EdgeMiddleware`: what every request passes on its way in, and every reply on its way out.

    name ─► open ─► bound head and body ─► application ─► reply, or error reply ─► record

`Edge` is what a server decides of it. `Protocol` asks it too, for requests that never become one.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import structlog
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from workers.api.errors import KvrelayError, RequestTooLarge, RequestTooSlow
from workers.api.http.body import bounded, drop_body, read_body, replayed, too_large
from workers.api.http.errors import ClientDisconnected, HeadersTooLarge, InternalError
from workers.api.http.replies import CLOSE, error_reply
from workers.api.logs import REQUEST_ID_HEADER, adopt_request_id, exception_fields
from workers.api.tracing import NOTHING

OPEN_PATHS = frozenset({"/livez", "/readyz", "/health", "/metrics"})  # health checks: no key, no log line
ENDS_CONNECTION = (HeadersTooLarge, RequestTooLarge, RequestTooSlow, InternalError)
CLOSE_HEADER = (b"connection", b"close")
DROP_BODY_S = 1.0  # the rest of a body is mostly on its way already

Endpoint = Callable[[Request], Awaitable[Response]]

log = structlog.get_logger()


class Bounds(NamedTuple):
    """What a client may send, and how slowly.

    `max_header_bytes` counts URL and headers. `body_s` is the time for the head, and again for the body. A client that
    takes nothing of its reply for `stall_s` is disconnected.
    """

    max_header_bytes: int
    max_body_bytes: int
    body_s: float
    stall_s: float


class Edge(ABC):
    """One server's decisions. `reads_body`: the body is received before the application is called."""

    reads_body = False

    @property
    @abstractmethod
    def bounds(self) -> Bounds: ...

    @abstractmethod
    def record(self, scope: Scope, status: int, took_ms: float) -> None:
        """Count and log a request that has ended."""

    @abstractmethod
    def readiness(self) -> dict[str, Any]:
        """The body of `/readyz`. Any `status` but "ready" makes it a 503."""

    @abstractmethod
    def render_metrics(self) -> bytes:
        """The body of `/metrics`."""

    def open(self, scope: Scope) -> AbstractContextManager[object]:
        """The block in which the request runs: a trace span, say. Raises for a caller that may not call at all."""
        return NOTHING

    def visible(self, error: KvrelayError) -> KvrelayError:
        """The error as a client may see it."""
        return error

    def reply(self, error: KvrelayError) -> Response:
        shown = self.visible(error)
        if shown is not error:
            log.warning("upstream_error", code=error.code, error=error.message)
        return error_reply(shown)


class EdgeMiddleware:
    """Gives the request its id (the client's if it is clean) and arrival time, bounds what the client sends, turns
    every error into a reply and records how the request ended.

    `scope["state"]` holds `request_id`, `arrived_at` and `status`: 499 until a reply begins, and what the application
    sets for a stream that breaks off after it has begun.

    A POST to a path in `shortcuts` goes to that endpoint directly, past FastAPI's router and exit stacks. They would
    add some 45 us of CPU to a request on which the gateway spends 330 us: `python -m benchmarks.edge` measures it.
    """

    def __init__(self, app: ASGIApp, edge: Edge, shortcuts: Mapping[str, Endpoint] = {}):
        self._app = app
        self._edge = edge
        self._shortcuts = shortcuts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        edge, bounds, state = self._edge, self._edge.bounds, scope.setdefault("state", {})
        request_id, arrived_at = adopt_request_id(scope["headers"]), time.monotonic()
        state.update(request_id=request_id, arrived_at=arrived_at, status=ClientDisconnected.status)
        has_begun = False
        receive_raw = receive

        async def send_reply(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                if state["status"] == ClientDisconnected.status:
                    state["status"] = message["status"]
                message["headers"] = [*message["headers"], (REQUEST_ID_HEADER.encode(), request_id.encode())]
                if state.get("body_left"):
                    await drop_body(receive_raw, bounds.max_body_bytes, DROP_BODY_S)
                    if state["body_left"] and CLOSE_HEADER not in message["headers"]:
                        message["headers"].append(CLOSE_HEADER)
            await send(message)

        try:
            with edge.open(scope):
                _check_head(scope, bounds)
                receive = bounded(receive, bounds.max_body_bytes)
                if edge.reads_body:
                    receive = replayed(await read_body(receive, bounds.body_s), receive)
                endpoint = self._shortcuts.get(scope["path"]) if scope["method"] == "POST" else None
                if endpoint is None:
                    await self._app(scope, receive, send_reply)
                else:
                    reply = await endpoint(Request(scope, receive))
                    await reply(scope, receive, send_reply)
        except Exception as error:
            if not isinstance(error, KvrelayError):
                log.error("internal_error", **exception_fields(error))
                error = InternalError("internal error")
            if not has_begun:
                reply = edge.reply(error)
                if isinstance(error, ENDS_CONNECTION) and state.get("body_left", True):
                    reply.headers.update(CLOSE)
                await reply(scope, receive_raw, send_reply)
        finally:
            edge.record(scope, state["status"], round((time.monotonic() - arrived_at) * 1000, 1))


def _check_head(scope: Scope, bounds: Bounds) -> None:
    num_bytes, length = len(scope["path"]) + len(scope["query_string"]), b"0"
    for name, value in scope["headers"]:
        num_bytes += len(name) + len(value)
        if name == b"content-length":
            length = value
    if num_bytes > bounds.max_header_bytes:
        raise HeadersTooLarge(f"{num_bytes} bytes of URL and headers; at most {bounds.max_header_bytes} are allowed")
    if length.isdigit() and int(length) > bounds.max_body_bytes:
        raise too_large(int(length), bounds.max_body_bytes)


def unread_scope() -> dict[str, Any]:
    """The scope of a request whose head never arrived whole, for `Edge.record`."""
    return {"type": "http", "path": "", "state": {}}
