"""The embedded families: pairs of models that work on a fresh machine, each with its fitted bundle.

A family is registered under the entry-point group `kvrelay.families`, as a function without arguments that returns its
`Family`. Only `Family.prepare` computes anything.

Model folders may be built on the user's machine (`build_once`). Their last bits differ between processors, so their
fingerprint is that of the recipe, not of the bytes. The digest of the bytes only detects later changes. Both are in the
folder's `kvrelay.json`.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from mappers.fingerprint import RECIPE_FILE, file_digest

ReportProgress = Callable[[str], None]


@dataclass(frozen=True)
class Family:
    """A small and a large model of one family, as folders in the Hugging Face layout, and the bundle between them.

    `prepare(report)` builds missing folders and reports its progress. `conversations()` returns the text on which the
    bundle is fitted and evaluated, as lists of OpenAI messages.
    """

    name: str
    source: Path
    target: Path
    bundle: Path
    corpus: str
    prepare: Callable[[ReportProgress], None]
    conversations: Callable[[], list[Any]]


def recipe_fingerprint(*parts: str) -> str:
    """SHA-256 over what a model is built from: the digests of its inputs, and the version of its recipe."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def is_built(folder: Path, fingerprint: str) -> bool:
    """Return whether `folder` holds the finished result of this recipe."""
    try:
        record = json.loads((folder / RECIPE_FILE).read_text())
    except (OSError, ValueError):
        return False
    return bool(record.get("fingerprint") == fingerprint and (folder / "model.safetensors").exists())


def build_once(folder: Path, fingerprint: str, build: Callable[[Path], None]) -> None:
    """Let `build` fill an empty folder, and move it to `folder` atomically. A second caller waits for the first."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
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
