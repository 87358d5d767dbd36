"""Analysis of request logs. A log is a file of JSON lines, one object per request, optionally gzipped; `-` is stdin."""

from __future__ import annotations

import gzip
import zlib
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson

STDIN = Path("-")
GZIP = b"\x1f\x8b"


class LogUnusable(ValueError):
    """A log cannot be read; the message names the file, the line and what is expected."""


def read_objects(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each line's place (`FILE:LINE`) and object, without empty lines. Raises `LogUnusable`."""
    try:
        with _open(path) as lines:
            for number, line in enumerate(lines, start=1):
                content = line.removeprefix(BOM_UTF8) if number == 1 else line
                if content.strip():
                    yield f"{path}:{number}", _object(f"{path}:{number}", content)
    except (OSError, EOFError, zlib.error) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        raise LogUnusable(f"cannot read {path}: {reason or error}") from error


@contextmanager
def _open(path: Path) -> Iterator[Iterable[bytes]]:
    is_stdin = path == STDIN
    with open(0 if is_stdin else path, "rb", closefd=not is_stdin) as file:
        yield gzip.open(file) if file.peek(len(GZIP)).startswith(GZIP) else file


def _object(place: str, line: bytes) -> dict[str, Any]:
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise LogUnusable(f"{place} is not JSON: {error.msg}, at character {error.colno}") from error
    if not isinstance(value, dict):
        raise LogUnusable(f"{place} is a JSON {type(value).__name__}; expected an object")
    return value
