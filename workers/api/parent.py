"""A process that must not outlive the one that started it: workers and gateway alike. Linux only."""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


class CannotFollow(RuntimeError):
    """The kernel will not tell when the parent ends."""


class ParentGone(CannotFollow):
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

    Raises `ParentGone`, and `CannotFollow` where there is no such signal.
    """
    if sys.platform != "linux":
        raise CannotFollow(f"--die-with-parent works on Linux only, not on {sys.platform}")
    parent = parent or os.getppid()
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0):
        raise CannotFollow(f"--die-with-parent: prctl failed: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:  # it ended before we asked, or before we ran
        raise ParentGone("--die-with-parent: the parent is gone already")
