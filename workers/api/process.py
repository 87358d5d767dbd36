"""What the server processes of gateway and worker share: the parent watch, the ready file, quiet progress bars."""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1


class ParentWatchError(RuntimeError):
    """The kernel will not tell when the parent ends."""


class ParentExited(ParentWatchError):
    """It has ended already."""


def add_parent_option(parser: argparse.ArgumentParser) -> None:
    """`--die-with-parent [PID]`: `die_with_parent` of it is None where it was not given."""
    parser.add_argument(
        "--die-with-parent",
        type=int,
        nargs="?",
        const=0,
        metavar="PID",
        help="end when the parent process ends (Linux); PID is its id, in case it has ended already",
    )


def die_with_parent(parent: int) -> None:
    """Ask the kernel for a SIGTERM when the parent ends; `parent` is its process id, 0 whoever it is now.

    Raises `ParentExited`, and `ParentWatchError` where there is no such signal.
    """
    if sys.platform != "linux":
        raise ParentWatchError(f"--die-with-parent works on Linux only, not on {sys.platform}")
    parent = parent or os.getppid()
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0):
        raise ParentWatchError(f"--die-with-parent: prctl failed: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:  # it ended before we asked, or before we ran
        raise ParentExited("--die-with-parent: the parent is gone already")


def write_ready_file(path: Path, url: str) -> None:
    """Writes `{"url", "pid"}`. Whoever finds the file finds all of it."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps({"url": url, "pid": os.getpid()}), encoding="utf-8")
    partial.replace(path)


def hide_progress_bars() -> None:
    """To be called before a library that draws them is imported; holds for the processes that are started, too."""
    if not sys.stderr.isatty():
        os.environ["TQDM_DISABLE"] = "1"
