"""Pure ASGI middleware around every call: the cluster secret, the body's size and time, and the record of it all."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager

import structlog
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from workers.api import tracing
from workers.api.errors import RequestTooLarge, RequestTooSlow, Unauthorized
from workers.api.logs import adopt_request_id, exception_fields
from workers.api.schemas import SECRET_HEADER
from workers.metrics import WorkerMetrics
from workers.routes.replies import CLIENT_CLOSED_REQUEST, error_reply, internal_error

OPEN_PATHS = frozenset({"/livez", "/readyz", "/health", "/metrics"})
SPANS = {
    "/v1/prefix/prefill": "prefill",
    "/v1/cache/transfer": "transfer",
    "/v1/chat/completions": "decode",
    "/v1/completions": "decode",
}
UNLOGGED = OPEN_PATHS | {"/v1/info"}  # asked every second

log = structlog.get_logger()


class RequireSecret:
    """Lets nobody in without the cluster secret, but to health and metrics."""

    def __init__(self, app: ASGIApp, secret: str):
        self._app = app
        self._secret = secret.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._knows_secret(scope):
            await self._app(scope, receive, send)
            return
        error = Unauthorized(f"the {SECRET_HEADER} header is missing or wrong")
        await error_reply(error)(scope, receive, send)

    def _knows_secret(self, scope: Scope) -> bool:
        given = dict(scope["headers"]).get(SECRET_HEADER.encode(), b"")
        return secrets.compare_digest(given, self._secret)


class LimitBody:
    """Receives the whole body before the app does; refuses one of more than `max_bytes`, and one that has not arrived
    whole within `max_s`, however steadily it trickles in."""

    def __init__(self, app: ASGIApp, max_bytes: int, max_s: float):
        self._app = app
        self._max_bytes = max_bytes
        self._max_s = max_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            body = await self._receive_in_time(scope, receive)
        except (RequestTooLarge, RequestTooSlow) as error:
            reply = error_reply(error)
            reply.headers["connection"] = "close"  # the rest of the body is not read
            await reply(scope, receive, send)
            return
        await self._app(scope, _replay(body, receive), send)

    async def _receive_in_time(self, scope: Scope, receive: Receive) -> Message:
        try:
            async with asyncio.timeout(self._max_s):
                return await self._receive(scope, receive)
        except TimeoutError as error:
            raise RequestTooSlow(f"the body did not arrive within {self._max_s:g} s") from error

    async def _receive(self, scope: Scope, receive: Receive) -> Message:
        announced = dict(scope["headers"]).get(b"content-length", b"")
        self._check(int(announced) if announced.isdigit() else 0)
        parts, num_bytes = [], 0
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return message
            parts.append(message.get("body", b""))
            num_bytes += len(parts[-1])
            self._check(num_bytes)
            if not message.get("more_body", False):
                return {"type": "http.request", "body": b"".join(parts), "more_body": False}

    def _check(self, num_bytes: int) -> None:
        if num_bytes > self._max_bytes:
            raise RequestTooLarge(f"the body has {num_bytes} bytes or more; at most {self._max_bytes} are taken")


def _replay(body: Message, receive: Receive) -> Receive:
    """A `receive` that gives `body` first."""
    messages = [body]

    async def replayed() -> Message:
        return messages.pop() if messages else await receive()

    return replayed


class Record:
    """Counts and logs calls by route and status, under the id of the request that they are made for; a path that is no
    route counts as `other`. A bug is logged by its place."""

    def __init__(self, app: ASGIApp, metrics: WorkerMetrics):
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, began = CLIENT_CLOSED_REQUEST, time.monotonic()
        adopt_request_id(scope["headers"])

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            with _traced(scope):
                await self._app(scope, receive, counted)
        except Exception as bug:
            log.error("internal_error", **exception_fields(bug))
            if status == CLIENT_CLOSED_REQUEST:
                await error_reply(internal_error())(scope, receive, counted)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            self._metrics.requests.labels(route, str(status)).inc()
            if route not in UNLOGGED:
                took_ms = round((time.monotonic() - began) * 1000, 1)
                log.info("call", route=route, status=status, took_ms=took_ms)


@contextmanager
def _traced(scope: Scope) -> Iterator[None]:
    """A span over the calls that do work."""
    name = SPANS.get(scope["path"]) or ("lease" if scope["path"].endswith("/lease") else None)
    if name is None or not tracing.is_on():
        yield
        return
    with tracing.span(name, incoming=Headers(scope=scope)):
        yield
