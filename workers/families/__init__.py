"""The embedded families: pairs of models that are at hand on a fresh machine, each with its fitted bundle.

A family is registered under the entry-point group `kvrelay.families`; the entry is a function without arguments that
returns its `Family`. Asking for one computes nothing: `prepare` does.

Model folders that are computed on the user's machine.

Their last bits differ with the processor, so their fingerprint is that of their recipe, not of their bytes; the digest
of the bytes only tells whether the folder was changed since. Both stand in the folder's `kvrelay.json`.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from mappers.fingerprint import RECIPE_FILE, file_digest

ReportProgress = Callable[[str], None]


@dataclass(frozen=True)
class Family:
    """A small and a large model of one family, as folders in the Hugging Face layout, and the bundle between them.

    `prepare(say)` makes the folders if they are not there yet, telling its progress; `conversations()` gives the text
    that the family's bundle is fitted and evaluated on, as lists of OpenAI messages.
    """

    name: str
    source: Path
    target: Path
    bundle: Path
    corpus: str
    prepare: Callable[[ReportProgress], None]
    conversations: Callable[[], list[Any]]


def recipe_fingerprint(*parts: str) -> str:
    """SHA-256 over what a derived model is made from: digests of its inputs, and the version of its recipe."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def is_built(folder: Path, fingerprint: str) -> bool:
    """Whether `folder` holds the finished result of this very recipe."""
    try:
        record = json.loads((folder / RECIPE_FILE).read_text())
    except (OSError, ValueError):
        return False
    return bool(record.get("fingerprint") == fingerprint and (folder / "model.safetensors").exists())


def build_once(folder: Path, fingerprint: str, build: Callable[[Path], None]) -> None:
    """Let `build` fill an empty folder, then put it in `folder`'s place, whole or not at all. A second caller waits
    for the first and finds the work done."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.parent / f".{folder.name}.lock"):
        if is_built(folder, fingerprint):
            return
        scratch = Path(mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            build(scratch)
            digest = file_digest(scratch / "model.safetensors")
            (scratch / RECIPE_FILE).write_text(json.dumps({"fingerprint": fingerprint, "output_digest": digest}))
            if folder.exists():
                shutil.rmtree(folder)
            scratch.rename(folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
