"""Where the commands leave their figures."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from mappers.errors import MapperError


def check_writable(*paths: Path | None) -> None:
    """Raise `MapperError` for a file that can't be written, before there is anything to write; None is none."""
    for path in filter(None, paths):
        if path.is_dir():
            raise MapperError(f"cannot write {path}: it is a folder")
        if not path.parent.is_dir():
            raise MapperError(f"cannot write {path}: there is no folder {path.parent}")
        if not path.exists():
            check_writable_folder(path.parent)
        elif not os.access(path, os.W_OK):
            raise MapperError(f"cannot write {path}: permission denied")


def check_writable_folder(folder: str | Path) -> None:
    """Raise `MapperError` unless a file can be made in this folder: one is, and is gone again."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise MapperError(f"cannot write to {folder}: {error.strerror}") from error


def write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise MapperError(f"cannot write {path}: {error.strerror}") from error
