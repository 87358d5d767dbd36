"""Run cases of the table and print their turns: `python -m tests.gateway.golden.run [--json FILE] [NAME ...]`.

It needs a process of its own, as it replaces the clock.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.gateway.golden import clock


def run(names: Sequence[str], folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Run the cases in order and return the turns of each."""
    from tests.gateway.golden.play import play

    turns = {}
    for name in names:
        clock.CLOCK.restart()
        random.seed(name)
        try:
            with asyncio.Runner(loop_factory=clock.new_loop) as runner:
                turns[name] = runner.run(play(name, folder))
        except Exception as error:
            turns[name] = [{"crashed": f"{type(error).__name__}: {error}"}]
    return turns


def _silence_logs() -> None:
    import structlog

    def drop(*_: object) -> str:
        raise structlog.DropEvent

    structlog.configure(processors=[drop], cache_logger_on_first_use=False)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gateway.golden.run", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="cases, or parts of their names; all by default")
    parser.add_argument("--json", type=Path, help="file to write the turns to")
    arguments = parser.parse_args(argv)
    clock.install()
    _silence_logs()
    from tests.gateway.golden.play import ROWS
    from tests.gateway.golden.store import as_json

    parts = arguments.names
    selected = set(parts) & ROWS.keys() or {name for name in ROWS if any(part in name for part in parts)}
    names = [name for name in ROWS if name in selected or not parts]
    with tempfile.TemporaryDirectory() as folder:
        key = Path(folder) / "admin-key"
        key.touch(mode=0o600)
        key.write_text("key-of-the-operator")
        turns = run(names, Path(folder))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(turns))
    else:
        sys.stdout.write(as_json(turns))
    return 0


if __name__ == "__main__":
    sys.exit(main())
