"""Where a command writes what it found: the report for people, a file for machines."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any


class OutputUnusable(OSError):
    """The message names the file and what is wrong with it."""


def add_json_option(parser: argparse.ArgumentParser, what: str) -> None:
    """`--json FILE`. A file that cannot be written is told before anything is measured."""
    parser.add_argument("--json", type=new_file, metavar="FILE", help=f"write {what} to FILE as JSON")


def tell(report: str, path: Path | None, content: Any) -> None:
    """The report to standard output and the content to the file, each even where the other cannot be written. Raises
    `OSError`."""
    try:
        print(report, flush=True)
    finally:
        write_json(path, content)


def write_json(path: Path | None, content: Any) -> None:
    """Nothing where no file was asked for. Raises `OutputUnusable`."""
    if path:
        write_text(path, json.dumps(content, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Raises `OutputUnusable`."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutputUnusable(f"cannot write {path}: {error.strerror}") from error


def new_file(text: str) -> Path:
    """The value of an option that names a file to write."""
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: there is no folder {path.parent}")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder; a file is needed")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} may not be written by this user")
    return path


def check_apart(parser: argparse.ArgumentParser, log: Path, *written: Path | None) -> None:
    """Ends the command, with status 2, where one of its files would be written over another, or over the log."""
    files = [path.resolve() for path in (log, *written) if path is not None and not path.is_char_device()]
    for path in files:
        if files.count(path) > 1:
            parser.error(f"{path} is named twice; the log and each file to write must be files of their own")
