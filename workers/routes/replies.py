"""Replies: JSON bodies, and errors as `{"error": {...}}` with the status that their class has."""

from __future__ import annotations

import math
from typing import Any

import orjson
import structlog
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from workers.api.errors import (
    BundleUnusable,
    CacheUnusable,
    DeadlineExceeded,
    HandoffDeclined,
    InvalidRequest,
    KvrelayError,
)

log = structlog.get_logger()

CLIENT_CLOSED_REQUEST = 499
NO_RETRY = (CacheUnusable, BundleUnusable, HandoffDeclined, DeadlineExceeded, InvalidRequest)


# Fields whose values are a tenant's own: no error repeats them.
UNTOLD = frozenset({"tenant_salt", "content", "text", "prompt", "prefix", "arguments", "stop", "body"})


class ClientGone(Exception):
    """The client has hung up; nobody reads the reply."""


def json_reply(body: BaseModel | dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> Response:
    content = body.model_dump() if isinstance(body, BaseModel) else body
    return Response(orjson.dumps(content), status, headers, media_type="application/json")


def error_reply(error: KvrelayError) -> Response:
    headers = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(math.ceil(error.retry_after_s))
    if isinstance(error, NO_RETRY):
        headers["x-should-retry"] = "false"
    return json_reply(error.body(), error.status, headers)


def install_error_replies(app: FastAPI) -> None:
    """Every failure of `app` answers in the shape of the contract."""
    app.add_exception_handler(KvrelayError, _on_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(ClientGone, _on_client_gone)
    app.add_exception_handler(Exception, _on_failure)


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, KvrelayError)
    return error_reply(error)


async def _on_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return error_reply(invalid(error.errors()[0]))


def invalid(problem: dict[str, Any]) -> InvalidRequest:
    """The first thing that pydantic found wrong, by the field's name, and its value where that is no user's text."""
    where = ".".join(str(part) for part in problem["loc"] if part not in ("body", "path", "query"))
    message = problem["msg"].removeprefix("Value error, ") + _got(problem)
    return InvalidRequest(f"{where}: {message}" if where else message, param=where or None)


def _got(problem: dict[str, Any]) -> str:
    value, field = problem.get("input"), problem["loc"][-1]
    if problem["type"] == "extra_forbidden" or field in UNTOLD or not isinstance(value, str | int | float):
        return ""
    return f", got {value!r:.100}"


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "invalid_request")
    message = f"{request.method} {request.url.path}: {error.detail}"
    body = {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}
    return json_reply(body, error.status_code, dict(error.headers or {}))


async def _on_client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _on_failure(request: Request, error: Exception) -> Response:
    return json_reply(internal_error().body(), 500, {"x-should-retry": "false"})


def internal_error() -> KvrelayError:
    """What a caller is told of a bug of ours; the log knows more."""
    return KvrelayError("the worker failed; its log says why")
