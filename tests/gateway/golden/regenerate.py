"""Record the table again: `python -m tests.gateway.golden.regenerate`. Read the diff before you commit it."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.gateway.golden.store import FOLDER, Turns, save

ROOT = FOLDER.parents[2]


def recorded(names: Sequence[str] = ()) -> Turns:
    """Run cases in a process of its own: all, or those whose names contain one of `names`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "turns.json"
        command = [sys.executable, "-W", "error", "-m", "tests.gateway.golden.run", "--json", str(path), *names]
        subprocess.run(command, cwd=ROOT, check=True)
        turns: Turns = json.loads(path.read_text())
    return turns


if __name__ == "__main__":
    save(recorded())
