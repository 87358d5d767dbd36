"""JSON logs for gateway and workers: one object per line, with the request id, and never a prompt's text.

The request id also travels in every call that is made for the request, so that the logs of all processes can be joined.
"""

from __future__ import annotations

import logging
import random
import re
import sys
import traceback
from collections.abc import Iterable, MutableMapping
from contextlib import suppress
from contextvars import ContextVar
from typing import Any, BinaryIO

import orjson
import structlog

from workers.api import tracing

OUR_PACKAGES = ("gateway", "workers", "mappers")  # their messages hold ids, counts and times only
REQUEST_ID_HEADER = "x-request-id"
REQUEST_ID = re.compile(r"^[A-Za-z0-9._-]{1,128}$")

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)


def configure_logs(file: BinaryIO) -> None:
    """Write structlog events, and warnings of the standard library's loggers, to `file` as JSON lines.

    The processor chain is structlog's documented fast set-up. A line that cannot be written is dropped.
    """
    structlog.configure(
        processors=[
            add_request_id,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            describe_exception,
            structlog.processors.JSONRenderer(orjson.dumps, default=repr, option=orjson.OPT_NON_STR_KEYS),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.BytesLoggerFactory(LossyFile(file)),  # type: ignore[arg-type]  # write and flush
        cache_logger_on_first_use=True,
    )
    logging.root.addHandler(LibraryLogHandler())


class LossyFile:
    """Drops what cannot be written, for example to a full disk: a log line must never fail a request."""

    def __init__(self, file: BinaryIO):
        self._file = file

    def write(self, data: bytes) -> None:
        with suppress(OSError):
            self._file.write(data)

    def flush(self) -> None:
        with suppress(OSError):
            self._file.flush()


def adopt_request_id(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Set the request id of the current context: the caller's if it is well-formed, otherwise a new one."""
    offered = dict(headers).get(REQUEST_ID_HEADER.encode(), b"").decode("latin-1")
    adopted = offered if REQUEST_ID.fullmatch(offered) else new_request_id()
    request_id.set(adopted)
    return adopted


def new_request_id() -> str:
    """32 random hex digits: unique, but not secret."""
    return f"{random.getrandbits(128):032x}"


def trace_headers() -> dict[str, str]:
    """Headers for a call made on behalf of the current request: its id and the trace context."""
    known = request_id.get()
    return ({} if known is None else {REQUEST_ID_HEADER: known}) | tracing.headers()


def add_request_id(logger: Any, name: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """structlog processor: add the request id."""
    known = request_id.get()
    if known is not None:
        event.setdefault("request_id", known)
    return event


def describe_exception(logger: Any, name: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """structlog processor: replace `exc_info` by `exception_fields`."""
    error = sys.exception() if event.pop("exc_info", None) else None
    if error is not None:
        event.update(exception_fields(error))
    return event


def exception_fields(error: BaseException) -> dict[str, Any]:
    """The log fields of an unexpected exception: its type and traceback, not its message, which may hold a prompt."""
    return {"error": type(error).__name__, "traceback": traceback.format_tb(error.__traceback__)}


class LibraryLogHandler(logging.Handler):
    """Forwards the standard library's log records to structlog.

    Of a library's message only the first line is kept, without its arguments: the rest may hold a prompt.
    """

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(Exception):  # a record that cannot be formatted must not fail its caller
            error = record.exc_info[1] if record.exc_info else None
            log = getattr(structlog.get_logger(), _level_name(record.levelno))
            fields = exception_fields(error) if error else {}
            log("library_log", logger=record.name, message=_safe_message(record), **fields)


def _level_name(level: int) -> str:
    return "error" if level >= logging.ERROR else "warning" if level >= logging.WARNING else "info"


def _safe_message(record: logging.LogRecord) -> str:
    if record.name.split(".")[0] in OUR_PACKAGES:
        return record.getMessage()
    if isinstance(record.msg, BaseException):
        return type(record.msg).__name__
    return str(record.msg).partition("\n")[0]
