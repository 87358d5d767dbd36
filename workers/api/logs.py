"""What ties together what gateway and workers tell of one request: its id, in every call and log line that is made for
it. And what a log is told of a bug, and of what libraries say."""

from __future__ import annotations

import logging
import random
import re
import sys
import traceback
from collections.abc import Iterable, MutableMapping
from contextlib import suppress
from contextvars import ContextVar
from typing import Any

import structlog

from workers.api import tracing

OURS = ("gateway", "workers", "mappers")  # whose log lines name ids, counts and times only
REQUEST_ID_HEADER = "x-request-id"
REQUEST_ID = re.compile(r"^[A-Za-z0-9._-]{1,128}$")

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)


def adopt_request_id(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The id of the request that begins here: the caller's where it is clean, else a new one. From now on it is that of
    all that is done in this context."""
    offered = dict(headers).get(REQUEST_ID_HEADER.encode(), b"").decode("latin-1")
    taken = offered if REQUEST_ID.fullmatch(offered) else new_request_id()
    request_id.set(taken)
    return taken


def new_request_id() -> str:
    """Told apart from any other, and no secret: 32 hex digits."""
    return f"{random.getrandbits(128):032x}"


def trace_headers() -> dict[str, str]:
    """For a call that is made for the request at hand."""
    known = request_id.get()
    return ({} if known is None else {REQUEST_ID_HEADER: known}) | tracing.headers()


def add_request_id(logger: Any, name: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """For structlog: the id, in every line."""
    known = request_id.get()
    if known is not None:
        event.setdefault("request_id", known)
    return event


def describe_exception(logger: Any, name: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """For structlog, in place of a traceback that ends in the error's words."""
    bug = sys.exception() if event.pop("exc_info", None) else None
    if bug is not None:
        event.update(exception_fields(bug))
    return event


def exception_fields(bug: BaseException) -> dict[str, Any]:
    """What the log is told of a bug of ours: its kind, and where it happened. Not its words, which may repeat a
    prompt."""
    return {"error": type(bug).__name__, "where": traceback.format_tb(bug.__traceback__)}


class LibraryLogHandler(logging.Handler):
    """What libraries log, as a line of structlog's. Of their words the first line, before values are put in; of a bug,
    what is `exception_fields`: the rest may repeat a prompt."""

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(Exception):  # what cannot be told is lost; whoever logs it goes on
            self._tell(record)

    def _tell(self, record: logging.LogRecord) -> None:
        bug = record.exc_info[1] if record.exc_info else None
        tell = getattr(structlog.get_logger(), _level(record.levelno))
        tell("logged", logger=record.name, said=_said(record), **(exception_fields(bug) if bug else {}))


def _level(number: int) -> str:
    return "error" if number >= logging.ERROR else "warning" if number >= logging.WARNING else "info"


def _said(record: logging.LogRecord) -> str:
    if record.name.split(".")[0] in OURS:
        return record.getMessage()
    if isinstance(record.msg, BaseException):
        return type(record.msg).__name__
    return str(record.msg).partition("\n")[0]
