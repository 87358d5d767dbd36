"""The file by which a server process tells whoever started it where it listens."""

from __future__ import annotations

import json
import os
from pathlib import Path


def tell_ready(path: Path, url: str) -> None:
    """Writes `{"url", "pid"}`. Whoever finds the file finds all of it."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps({"url": url, "pid": os.getpid()}), encoding="utf-8")
    partial.replace(path)
