"""A file system as containers see it, for processes in a mount namespace: this machine's, with other things in places.

Everything at the root is a link to the real thing below /real. Where something is put, the folders on the way to it
become folders of links, so that /etc/hosts, say, is ours and the rest of /etc is as it was. Nothing real is written to.
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
    """Make the root of this process, and of those that it starts. Needs a mount namespace of its own."""
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


def put(target: Path, source: Path) -> None:
    """`source` is found at `target`."""
    _open_way(target.parent)
    target.unlink(missing_ok=True)
    target.symlink_to(source)


def write(target: Path, text: str) -> None:
    _open_way(target.parent)
    target.unlink(missing_ok=True)
    target.write_text(text, encoding="utf-8")


def folder(target: Path) -> Path:
    """A new, empty folder at `target`."""
    _open_way(target.parent)
    target.unlink(missing_ok=True)
    target.mkdir()
    return target


def memory(target: Path, num_bytes: int) -> None:
    """A file system in memory, of that size, over a folder that is there."""
    _mount("-t", "tmpfs", "-o", f"size={num_bytes},mode=1777", "none", target)


def loopback_up() -> None:
    """A new network namespace has a loopback that is down."""
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", _IFF_UP))


def _open_way(path: Path) -> None:
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
