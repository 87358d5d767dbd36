"""A log is a file of JSON lines, one object a request."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson


class LogUnusable(ValueError):
    """The message names the file, the line and what is needed."""


def objects(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The place (`FILE:LINE`) and the object of every line that is not empty. Raises `LogUnusable`."""
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield f"{path}:{number}", _object(f"{path}:{number}", line)
    except OSError as error:
        raise LogUnusable(f"cannot read {path}: {error.strerror}") from error


def _object(place: str, line: bytes) -> dict[str, Any]:
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise LogUnusable(f"{place} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise LogUnusable(f"{place} is a JSON {type(value).__name__}; an object is needed")
    return value
