"""How a command ends and what it writes: exit statuses, a table for people, JSON for machines."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from workers.api.errors import KvrelayError

FAILED = 2
INTERRUPTED, BROKEN_PIPE = 128 + signal.SIGINT, 128 + signal.SIGPIPE  # as in a shell


class OutputUnusable(OSError):
    """An output file cannot be written; the message names it and the reason."""


# Exit statuses


def run_command(name: str, work: Callable[[], int], *expected: type[Exception]) -> int:
    """Run `work` and return the exit status.

    The status is 2, with one line on standard error, for `KvrelayError`, `OSError` and the `expected` errors; 130 after
    an interrupt; 141 when the reader of standard output has gone.
    """
    errors: tuple[type[Exception], ...] = (KvrelayError, OSError, *expected)
    try:
        status = work()
        print(end="", flush=True)
        return status
    except BrokenPipeError:
        _discard_output()
        return BROKEN_PIPE
    except errors as error:
        _discard_output()
        print(f"{name}: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return INTERRUPTED


def _discard_output() -> None:
    """Drop what could not be printed: otherwise the interpreter tries again at exit, and complains."""
    try:
        print(end="", flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# Files


def add_json_option(parser: argparse.ArgumentParser, what: str) -> None:
    """Add `--json FILE`. The parser rejects a file that cannot be written, before anything is measured."""
    parser.add_argument("--json", type=new_file, metavar="FILE", help=f"write {what} to FILE as JSON")


def new_file(text: str) -> Path:
    """Parse an option that names a file to write."""
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: there is no folder {path.parent}")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder; expected a file")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} is not writable by this user")
    return path


def check_distinct(parser: argparse.ArgumentParser, log: Path, *written: Path | None) -> None:
    """Exit with status 2 if an output file would overwrite the log or another output file."""
    files = [path.resolve() for path in (log, *written) if path is not None and not path.is_char_device()]
    for path in files:
        if files.count(path) > 1:
            parser.error(f"{path} is named twice; the log and every output file must be different files")


def write_results(report: str, path: Path | None, content: Any) -> None:
    """Print the report and write the JSON file. Each is attempted even if the other fails. Raises `OSError`."""
    try:
        print(report, flush=True)
    finally:
        write_json(path, content)


def write_json(path: Path | None, content: Any) -> None:
    """Write `content` if a path is given. Raises `OutputUnusable`."""
    if path:
        write_text(path, json.dumps(content, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Raises `OutputUnusable`."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutputUnusable(f"cannot write {path}: {error.strerror}") from error


# Tables


def render(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Format a plain table: columns as wide as their widest cell, numbers right-aligned, None as a dash."""
    cells = [list(head), *([_cell(value) for value in row] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(head))]
    numeric = [all(isinstance(row[column], (int, float, type(None))) for row in rows) for column in range(len(head))]
    lines = [
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, numeric, strict=True)
        ).rstrip()
        for line in cells
    ]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 10 else f"{value:.2f}"
    return str(value)
