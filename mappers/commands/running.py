"""How a command ends: what a user can mend is told in a line, and Ctrl-C with what the next run goes on from."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from mappers.errors import MapperError

INTERRUPTED = 128 + signal.SIGINT  # as a shell has it


def run(name: str, work: Callable[[], None]) -> int:
    """Do the work of `kvrelay name`; its exit status."""
    try:
        work()
    except (MapperError, OSError) as error:
        return _told(name, str(error), 1)
    except KeyboardInterrupt as interrupt:
        return _told(name, f"interrupted; {interrupt}" if interrupt.args else "interrupted", INTERRUPTED)
    return 0


@contextmanager
def resumable(kept: Path | None) -> Iterator[None]:
    """If this is interrupted, the file that was kept is told: the next run goes on from there."""
    try:
        yield
    except KeyboardInterrupt:
        what = f"the same command goes on from {kept}" if kept and kept.exists() else "nothing was kept"
        raise KeyboardInterrupt(what) from None


def _told(name: str, what: str, status: int) -> int:
    print(f"kvrelay {name}: {what}", file=sys.stderr)
    return status
