"""Record the table again: `python -m tests.gateway.golden.regenerate`. Review the diff before you commit it."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.gateway.golden.play import ROWS
from tests.gateway.golden.store import FOLDER, Turns, save

ROOT = FOLDER.parents[2]
NUM_PROCESSES = 2


def record(names: Sequence[str] = tuple(ROWS)) -> Turns:
    """Run cases in separate processes, where the clock skips waits."""
    turns: Turns = {}
    with tempfile.TemporaryDirectory() as folder:
        runs = []
        for number in range(min(NUM_PROCESSES, len(names))):
            path = Path(folder) / f"turns-{number}.json"
            command = [sys.executable, "-W", "error", "-m", "tests.gateway.golden.run", "--json", str(path)]
            runs.append((subprocess.Popen([*command, *names[number::NUM_PROCESSES]], cwd=ROOT), path))
        for run, path in runs:
            if run.wait():
                raise subprocess.CalledProcessError(run.returncode, run.args)
            turns |= json.loads(path.read_text())
    return turns


if __name__ == "__main__":
    save(record())
