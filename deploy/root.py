"""A root file system as in the containers, for processes in their own mount namespace.

Every entry at the root is a link to the same entry below /real. Placing a file turns the folders above it into folders
of links: /etc/hosts, for example, is replaced, and the rest of /etc stays. Nothing real is written to.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import subprocess
from pathlib import Path

ROOT = Path("/mnt")
REAL = Path("/real")
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1


def enter() -> None:
    """Change the root of this process and its children. Needs its own mount namespace."""
    _mount("-t", "tmpfs", "none", ROOT)
    real = ROOT / REAL.name
    real.mkdir()
    _mount("--rbind", "/", real)
    for entry in sorted(real.iterdir()):
        if entry.name != REAL.name:
            (ROOT / entry.name).symlink_to(REAL / entry.name)
    here = Path.cwd()
    os.chroot(ROOT)
    os.chdir(here)


def link(target: Path, source: Path) -> None:
    """Link `target` to `source`."""
    _unlink_parents(target.parent)
    target.unlink(missing_ok=True)
    target.symlink_to(source)


def write(target: Path, text: str) -> None:
    _unlink_parents(target.parent)
    target.unlink(missing_ok=True)
    target.write_text(text, encoding="utf-8")


def folder(target: Path) -> Path:
    """Create an empty folder at `target`."""
    _unlink_parents(target.parent)
    target.unlink(missing_ok=True)
    target.mkdir()
    return target


def mount_memory(target: Path, num_bytes: int) -> None:
    """Mount a file system in memory over an existing folder."""
    _mount("-t", "tmpfs", "-o", f"size={num_bytes},mode=1777", "none", target)


def loopback_up() -> None:
    """Bring up the loopback of a new network namespace."""
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", _IFF_UP))


def _unlink_parents(path: Path) -> None:
    for step in [*reversed(path.parents), path][1:]:
        if not step.is_symlink():
            step.mkdir(exist_ok=True)
            continue
        linked = step.resolve()
        step.unlink()
        step.mkdir()
        for entry in linked.iterdir():
            (step / entry.name).symlink_to(entry)


def _mount(*arguments: str | Path) -> None:
    subprocess.run(["mount", *arguments], check=True)
