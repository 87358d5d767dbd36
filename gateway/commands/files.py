"""Where a command that measures writes what it found, for machines."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


def add_json_option(parser: argparse.ArgumentParser, what: str) -> None:
    """`--json FILE`. A file that cannot be written is told before anything is measured."""
    parser.add_argument("--json", type=_new_file, metavar="FILE", help=f"write {what} to FILE as JSON")


def write_json(path: Path | None, content: Any) -> None:
    """Nothing where no file was asked for."""
    if path:
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _new_file(text: str) -> Path:
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: there is no folder {path.parent}")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder; a file is needed")
    return path
