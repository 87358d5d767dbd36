"""Every failure in the OpenAI shape: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

from typing import Any

import orjson
import structlog
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from gateway import errors
from gateway.errors import InternalError, MethodNotAllowed, NotFound
from workers.api.errors import KvrelayError

CLOSE = {"connection": "close"}  # what else the client sends is not read

log = structlog.get_logger()


def json_reply(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(body), status, headers, media_type="application/json")


def install_error_replies(app: FastAPI) -> None:
    app.add_exception_handler(KvrelayError, on_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_bug)


def error_reply(error: KvrelayError, headers: dict[str, str] | None = None) -> Response:
    told = errors.for_client(error)
    return json_reply(told.body(), told.status, errors.reply_headers(told) | (headers or {}))


def no_such_route(request: Request) -> NotFound:
    return NotFound(f"{request.method} {request.url.path}: there is no such route")


async def on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, KvrelayError)
    if errors.for_client(error) is not error:
        log.warning("upstream_error", code=error.code, error=error.message)
    return error_reply(error)


async def _on_bug(request: Request, error: Exception) -> Response:
    """Which goes on to be logged."""
    return error_reply(InternalError("internal error"), CLOSE)


async def _on_http_error(request: Request, error: Exception) -> Response:
    """Starlette's own: a route or a method that does not exist."""
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        return error_reply(
            MethodNotAllowed(f"{request.method} {request.url.path}: allowed is {allowed}"), dict(error.headers or {})
        )
    return error_reply(no_such_route(request))

