"""Log lines as JSON, cheaply, as a request has several: each is made in one step, and those of one turn of the event
loop go out in one write."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Any, BinaryIO

import orjson
import structlog

from workers.api.logs import LibraryLogHandler, add_request_id

OPTIONS = orjson.OPT_UTC_Z | orjson.OPT_NON_STR_KEYS | orjson.OPT_APPEND_NEWLINE


@contextmanager
def log_to(file: BinaryIO) -> Iterator[None]:
    """All of structlog's lines go there, and what libraries log; at the end of the block every one is written."""
    lines, libraries = Lines(file), LibraryLogHandler()
    structlog.configure(
        wrapper_class=LineLogger,  # type: ignore[arg-type]  # nothing is ever bound
        logger_factory=lambda *names: lines,
        cache_logger_on_first_use=True,
    )
    logging.root.addHandler(libraries)
    try:
        yield
    finally:
        logging.root.removeHandler(libraries)
        lines.flush()


class LineLogger:
    """A structlog logger with nothing bound to it, and no processors."""

    def __init__(self, lines: Lines, processors: object, context: object):
        self._lines = lines

    def info(self, event: str, **told: Any) -> None:
        self._add("info", event, told)

    def warning(self, event: str, **told: Any) -> None:
        self._add("warning", event, told)

    def error(self, event: str, **told: Any) -> None:
        self._add("error", event, told)

    def _add(self, level: str, event: str, told: dict[str, Any]) -> None:
        line = add_request_id(None, level, {"event": event, **told, "level": level, "timestamp": datetime.now(UTC)})
        self._lines.add(orjson.dumps(line, default=repr, option=OPTIONS))


class Lines:
    """Where log lines go: with all others of the same turn of the event loop; without a loop, or from another thread,
    at once. Lines that cannot be written, on a full disk say, are lost, and nothing else."""

    def __init__(self, file: BinaryIO):
        self._file = file
        self._waiting: list[bytes] = []

    def add(self, line: bytes) -> None:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            self._write(line)
            return
        self._waiting.append(line)
        if len(self._waiting) == 1:
            loop.call_soon(self.flush)

    def flush(self) -> None:
        lines, self._waiting = self._waiting, []
        if lines:
            self._write(b"".join(lines))

    def _write(self, data: bytes) -> None:
        with suppress(OSError):
            self._file.write(data)
            self._file.flush()
