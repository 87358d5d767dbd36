"""Pure ASGI, outermost first: `Trace` names and measures every request and lays down which configuration it sees,
`Bounds` refuses what is too large."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import structlog
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.connection import drop_body
from gateway.errors import HeadersTooLarge, InternalError
from gateway.http.replies import CLOSE, error_reply
from gateway.settings import Limits
from gateway.snapshot import Gateway
from workers.api import tracing
from workers.api.errors import KvrelayError, RequestTooLarge
from workers.api.logs import REQUEST_ID_HEADER, adopt_request_id, exception_fields

UNTOLD = 499  # until a response starts: the status of one that nobody waited for
NAMED = REQUEST_ID_HEADER.encode()
CLOSING = (b"connection", b"close")
DROPPING_S = 1.0  # what is left of a body mostly is on its way
UNMETERED = ("/livez", "/readyz", "/health", "/metrics")

log = structlog.get_logger()


class Trace:
    """Gives the request its id (the client's where that is clean) and arrival time; counts and logs how it ended.
    A bug of ours is logged here, and told as a 500 without its words. What has not arrived of a body when its answer
    begins is waited for shortly, and then left: the connection closes.

    The route finds its snapshot in `scope["state"]`, and leaves the model's label, tier and path there.
    """

    def __init__(self, app: ASGIApp, gateway: Gateway):
        self._app = app
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        state |= {"request_id": adopt_request_id(scope["headers"]), "arrived_at": time.monotonic(), "status": UNTOLD}

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                if state["status"] == UNTOLD:  # a stream may have broken off behind its first frame
                    state["status"] = message["status"]
                message["headers"] = [*message["headers"], (NAMED, state["request_id"].encode())]
                if state.get("body_left"):
                    await self._rid_of_body(message, state, receive)
            await send(message)

        try:
            with self._gateway.current as snapshot, _traced(scope):
                state["snapshot"] = snapshot
                await self._app(scope, receive, sending)
        except Exception as error:
            log.error("internal_error", **exception_fields(error))
            if state["status"] == UNTOLD:
                await error_reply(InternalError("internal error"), CLOSE)(scope, receive, sending)
        finally:
            self._ended(scope, state)

    async def _rid_of_body(self, message: Message, state: dict[str, Any], receive: Receive) -> None:
        await drop_body(receive, self._gateway.settings.limits.max_body_bytes, DROPPING_S)
        if state["body_left"] and CLOSING not in message["headers"]:
            message["headers"].append(CLOSING)

    def _ended(self, scope: Scope, state: dict[str, Any]) -> None:
        if scope["path"] in UNMETERED:
            return
        self._gateway.metrics.requests.labels(state.get("model_label", "none"), state["status"]).inc()
        took_ms = round((time.monotonic() - state["arrived_at"]) * 1000, 1)
        told = {key: state[key] for key in ("tenant", "tier", "path") if key in state}
        log.info("request", status=state["status"], took_ms=took_ms, **told)


class Bounds:
    """Refuses URLs, headers and bodies over the limits; a body without a length is counted as it comes."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        limits: Limits = scope["state"]["snapshot"].settings.limits
        try:
            _check(scope, limits)
        except KvrelayError as error:
            await error_reply(error, CLOSE)(scope, receive, send)
            return
        await self._app(scope, self._counting(receive, limits.max_body_bytes), send)

    def _counting(self, receive: Receive, most: int) -> Receive:
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > most:
                raise _too_large(num_bytes, most)
            return message

        return counted


def _check(scope: Scope, limits: Limits) -> None:
    num_bytes, length = len(scope["path"]) + len(scope["query_string"]), b"0"
    for name, value in scope["headers"]:
        num_bytes += len(name) + len(value)
        if name == b"content-length":
            length = value
    if num_bytes > limits.max_header_bytes:
        raise HeadersTooLarge(f"{num_bytes} bytes of URL and headers; at most {limits.max_header_bytes} are allowed")
    if length.isdigit() and int(length) > limits.max_body_bytes:
        raise _too_large(int(length), limits.max_body_bytes)


def _too_large(num_bytes: int, most: int) -> RequestTooLarge:
    return RequestTooLarge(f"a body of {num_bytes} bytes; at most {most} are allowed")


def _traced(scope: Scope) -> AbstractContextManager[None]:
    """A span over the request, which tells in the end who answered it."""
    return _span(scope) if tracing.is_on() and scope["path"] not in UNMETERED else tracing.NOTHING


@contextmanager
def _span(scope: Scope) -> Iterator[None]:
    state = scope["state"]
    with tracing.span("request", incoming=Headers(scope=scope)):
        yield
        tracing.tell(
            {
                tracing.REQUEST_MODEL: state.get("model_label"),
                tracing.RESPONSE_MODEL: state.get("model"),
                tracing.PATH: state.get("path"),
            }
        )
