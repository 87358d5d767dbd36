"""Replies as JSON; every error in the OpenAI shape, `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import orjson
import structlog
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from workers.api.errors import InvalidRequest, KvrelayError
from workers.api.http.errors import InternalError, MethodNotAllowed, NotFound, invalid_request
from workers.api.logs import exception_fields

DEFAULT_RETRY_AFTER_S = 1.0
RETRY_LATER = (429, 503)
DO_NOT_RETRY = (408, 409, 504)
CLOSE = {"connection": "close"}  # the rest of the request is not read

log = structlog.get_logger()


def operation_id(route: APIRoute) -> str:
    """The operation's name in the OpenAPI document."""
    return route.name


class ErrorDetail(BaseModel):
    """What went wrong. `code` is stable and machine-readable; `param` is the offending field."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorReply(BaseModel):
    """The body of every reply with a status of 400 or more."""

    error: ErrorDetail


def json_reply(
    body: BaseModel | Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    content = body.model_dump() if isinstance(body, BaseModel) else body
    return Response(orjson.dumps(content), status, headers, media_type="application/json")


def error_reply(error: KvrelayError, headers: Mapping[str, str] = {}) -> Response:
    """The error with its status; `Retry-After` where waiting helps, `x-should-retry: false` where a retry cannot."""
    retry: dict[str, str] = {}
    if error.status in RETRY_LATER:
        retry["retry-after"] = str(math.ceil(error.retry_after_s or DEFAULT_RETRY_AFTER_S))
    elif error.status in DO_NOT_RETRY:
        retry["x-should-retry"] = "false"
    return json_reply(error.body(), error.status, retry | dict(headers))


def log_error(event: str, error: Exception) -> KvrelayError:
    """The error as one with a status. Logs it by its code, as `event`; a bug by its type and place."""
    if isinstance(error, KvrelayError):
        log.info(event, code=error.code)
        return error
    log.error("internal_error", **exception_fields(error))
    return InternalError("internal error")


def install_error_replies(app: FastAPI) -> None:
    """Give FastAPI's own errors the OpenAI shape. All others pass through to `EdgeMiddleware`, which replies."""
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    if error.status_code == 404:
        return error_reply(route_not_found(request), headers)
    if error.status_code == 405:
        allowed = headers.get("Allow", "another method")
        return error_reply(MethodNotAllowed(f"{request.method} {request.url.path}: allowed: {allowed}"), headers)
    return error_reply(InvalidRequest(str(error.detail)), headers)


async def _on_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    problems = [one | {"loc": one["loc"][1:]} for one in error.errors()]  # without "body" or "path"
    raise invalid_request(problems, hide_private=True) from error


def route_not_found(request: Request) -> NotFound:
    return NotFound(f"{request.method} {request.url.path}: no such route")
