"""Run the install steps of an image without a container engine, in a temporary folder.

    python -m deploy.installs gateway
    python -m deploy.installs worker        installs torch: some minutes, and gigabytes

TORCH_INDEX in the environment works as the build argument of that name. The exit status is that of the steps.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from deploy.composed import DOCKERFILE, REPOSITORY

IMAGES = ("gateway", "worker")
FIRST = "base"
VENV = "/opt/kvrelay"


def copies(stage: str) -> list[tuple[str, str]]:
    """Return what a stage and those below it copy, as (from, to)."""
    lines = [line.split()[1:] for line in _lines(stage) if line.startswith("COPY ")]
    return [(source, target) for *sources, target in lines for source in sources]


def copy(stage: str, folder: Path) -> None:
    """Copy it into `folder`."""
    folder.mkdir(exist_ok=True)
    for source, target in copies(stage):
        whole, into = REPOSITORY / source, folder / target
        into.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if whole.is_dir() else shutil.copy)(whole, into)


def commands(stage: str) -> list[str]:
    """Return what a stage and those below it run."""
    return [line.removeprefix("RUN ") for line in _lines(stage) if line.startswith("RUN ")]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m deploy.installs", description="Run an image's install steps.")
    parser.add_argument("image", choices=IMAGES)
    stage = f"{parser.parse_args().image}-build"
    with TemporaryDirectory() as folder:
        source, venv = Path(folder) / "src", Path(folder) / "venv"
        copy(stage, source)
        path = f"{venv / 'bin'}:{Path(sys.executable).parent}:/usr/bin:/bin"
        for command in commands(stage):
            sys.stderr.write(f"{command}\n")
            here = command.replace(VENV, str(venv))
            ran = subprocess.run(["sh", "-ec", here], cwd=source, env=os.environ | {"PATH": path})
            if ran.returncode != 0:
                return ran.returncode
    return 0


def _lines(stage: str) -> list[str]:
    """Return the lines of a stage and those below it, except the first, which installs nothing.

    Raises `LookupError` for an unknown stage.
    """
    text = re.sub(r"\s*\\\n\s*", " ", DOCKERFILE.read_text())
    found = re.search(rf"^FROM (\S+) AS {stage}$(.*?)(?=^FROM |\Z)", text, re.MULTILINE | re.DOTALL)
    if found is None:
        raise LookupError(f"unknown stage {stage!r} in {DOCKERFILE.name}")
    below = [] if stage == FIRST or found[1] == FIRST else _lines(found[1])
    return below + found[2].splitlines()


if __name__ == "__main__":
    sys.exit(main())
