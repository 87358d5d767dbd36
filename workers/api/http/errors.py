"""Errors of the HTTP edge itself, and what a client reads of a body that does not validate.

KvrelayError                    (workers.api.errors)
└── EdgeError                   shown to the client unchanged
    ├── NotFound           404  no such route, or no such thing
    ├── MethodNotAllowed   405
    ├── HeadersTooLarge    431
    ├── ClientDisconnected 499  in logs and metrics only
    └── InternalError      500  a bug; the log has its type and place
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from workers.api.errors import InvalidRequest, KvrelayError

# Fields that hold a tenant's own text or salt.
PRIVATE_FIELDS = frozenset({"tenant_salt", "content", "text", "prompt", "prefix", "arguments", "stop", "body"})
MAX_SHOWN_CHARS = 80


class EdgeError(KvrelayError):
    """Raised by the HTTP edge."""


class NotFound(EdgeError):
    status, type, code = 404, "invalid_request_error", "not_found"


class MethodNotAllowed(EdgeError):
    status, type, code = 405, "invalid_request_error", "method_not_allowed"


class HeadersTooLarge(EdgeError):
    status, type, code = 431, "invalid_request_error", "headers_too_large"


class ClientDisconnected(EdgeError):
    status, type, code = 499, "client_disconnected", "client_disconnected"


class InternalError(EdgeError):
    status, type, code = 500, "internal_error", "internal_error"


NO_BODY = "a JSON body is required"


def invalid_request(
    problems: Sequence[Mapping[str, Any]], known_fields: Iterable[str] = (), *, hide_private: bool
) -> InvalidRequest:
    """The most specific of pydantic's `problems`: the field, what is wrong with it, and its value. `hide_private`
    leaves out values that are, or may hold, a tenant's own text."""
    problem = max(problems, key=lambda one: len(one["loc"]))
    location = [part for part in problem["loc"] if not _is_union_branch(part)]
    field = clipped(".".join(map(str, location)))
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "extra_forbidden" and len(location) == 1 and known_fields:
        return InvalidRequest(f"unknown field {field!r}; known: {', '.join(known_fields)}", param=field)
    if problem["type"] == "missing":
        return InvalidRequest(f"{field}: this field is required", param=field) if field else InvalidRequest(NO_BODY)
    if not field:
        return InvalidRequest(message)
    value = problem.get("input")
    if hide_private and (
        problem["type"] == "extra_forbidden"
        or PRIVATE_FIELDS.intersection(map(str, location))
        or not isinstance(value, str | int | float)
    ):
        return InvalidRequest(f"{field}: {message}", param=field)
    return InvalidRequest(f"{field}: {message}; got {clipped(repr(value))}", param=field)


def _is_union_branch(part: int | str) -> bool:
    """Whether pydantic names a type here: one that a value of several allowed types was checked against."""
    return part == "str" or "[" in str(part)


def clipped(text: str) -> str:
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}... ({len(text)} characters)"
