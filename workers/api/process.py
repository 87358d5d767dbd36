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
    """The process cannot watch its parent."""


class ParentExited(ParentWatchError):
    """The parent has already exited."""


def add_parent_option(parser: argparse.ArgumentParser) -> None:
    """Add `--die-with-parent [PID]`; the parsed `die_with_parent` is None if the option is absent."""
    parser.add_argument(
        "--die-with-parent",
        type=int,
        nargs="?",
        const=0,
        metavar="PID",
        help="exit when the parent process exits (Linux only); PID is its id, in case it has already exited",
    )


def die_with_parent(parent: int) -> None:
    """Ask the kernel for a SIGTERM when the parent exits. `parent` is its process id; 0 means the current parent.

    Raises `ParentExited`, and `ParentWatchError` on systems without that signal.
    """
    if sys.platform != "linux":
        raise ParentWatchError(f"--die-with-parent works on Linux only, not on {sys.platform}")
    parent = parent or os.getppid()
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0):
        raise ParentWatchError(f"--die-with-parent: prctl failed: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:  # it exited before the call, or before this process ran
        raise ParentExited("--die-with-parent: the parent has already exited")


def write_ready_file(path: Path, url: str) -> None:
    """Write `{"url", "pid"}` atomically, for the process that started this one."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps({"url": url, "pid": os.getpid()}), encoding="utf-8")
    partial.replace(path)


def hide_progress_bars() -> None:
    """Switch off tqdm's progress bars unless stderr is a terminal.

    Call it before importing a library that draws them. Child processes inherit the setting.
    """
    if not sys.stderr.isatty():
        os.environ["TQDM_DISABLE"] = "1"
