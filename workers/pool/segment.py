"""A pool's file in shared memory: who owns it, the blocks' generations, and (on the CPU) the blocks themselves.

    page 0      header: magic, version, number of blocks, bytes a block, where the blocks begin, epoch
    page 1..    generations, one int64 a block; odd while the block is being written
    ..end       blocks (none when they lie in a GPU's memory)

The owner holds an exclusive `flock` on the file for as long as it lives: the kernel drops it however the owner ends,
and a pid that is used again cannot fool anyone. The file is never truncated, so that no reader's mapping can fault, and
its memory is reserved at creation, so that no write of the owner's can.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import re
import stat
import struct
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from workers.api.errors import CacheStale, InvalidRequest, KvrelayError, TransferFailed

SHM = Path("/dev/shm")
_MAGIC = b"KVRELAY\0"
_VERSION = 1
_HEADER = struct.Struct("<8sI4xQQQ32s")
_PAGE = 4096
_MADV_POPULATE_WRITE = 23  # of Linux 5.14 on; Python's mmap has no name for it yet
TRIES, BETWEEN_TRIES_S = 50, 0.002  # at the lock of an owner that seems dead
_WORKER = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_NAME = re.compile(rf"kvrelay-\d+-{_WORKER.pattern}-[0-9a-f]{{32}}")

Generations = npt.NDArray[np.int64]


class PoolMemoryError(KvrelayError):
    """The memory for a pool is not there; the message says how much is."""

    code = "pool_memory"


@dataclass(frozen=True)
class Header:
    num_blocks: int
    block_bytes: int
    epoch: str

    @property
    def data_offset(self) -> int:
        return _PAGE + _pages(self.num_blocks * 8)

    @property
    def size(self) -> int:
        return self.data_offset + _pages(self.num_blocks * self.block_bytes)

    def pack(self) -> bytes:
        return _HEADER.pack(
            _MAGIC, _VERSION, self.num_blocks, self.block_bytes, self.data_offset, self.epoch.encode()
        )

    @staticmethod
    def unpack(raw: bytes) -> Header:
        if len(raw) < _HEADER.size:
            raise TransferFailed(f"a pool's header has {_HEADER.size} bytes; this file has {len(raw)}")
        magic, version, num_blocks, block_bytes, _, epoch = _HEADER.unpack(raw[: _HEADER.size])
        if magic != _MAGIC or version != _VERSION:
            raise TransferFailed(f"not a pool of version {_VERSION}: {magic!r}, version {version}")
        return Header(num_blocks, block_bytes, epoch.decode())


class Segment:
    """A mapped pool file. Writable for its owner (`create`) and whom it lets write, read-only for everyone else
    (`attach`)."""

    def __init__(self, fd: int, path: Path, header: Header, *, owner: bool, writable: bool = False):
        self.path = path
        self.header = header
        self._fd: int | None = fd
        self._owner = owner
        access = mmap.ACCESS_WRITE if owner or writable else mmap.ACCESS_READ
        memory = mmap.mmap(fd, header.size, access=access)
        if owner:
            _map_in(memory)
        self.generations: Generations = np.frombuffer(memory, np.int64, header.num_blocks, _PAGE)
        self.blocks = memoryview(memory)[header.data_offset :]

    @staticmethod
    def create(worker: str, header: Header, directory: Path = SHM) -> Segment:
        """A new file `kvrelay-<uid>-<worker>-<epoch>`, mode 0600, locked by this process."""
        path = directory / segment_name(worker, header.epoch)
        fd = _create_locked(path)
        try:
            _reserve(fd, header.size, directory)
            os.pwrite(fd, header.pack(), 0)
            return Segment(fd, path, header, owner=True)
        except BaseException:
            path.unlink(missing_ok=True)
            os.close(fd)
            raise

    @staticmethod
    def attach(name: str, directory: Path = SHM, *, writable: bool = False) -> Segment:
        """Another process's file; `writable` for one that writes blocks in its owner's name. Refuses a name that is not
        a pool's, and a file that another user can reach."""
        if not _NAME.fullmatch(name):
            raise TransferFailed(f"{name!r} does not name a pool's file (kvrelay-<uid>-<worker>-<epoch>)")
        path = directory / name
        try:
            access = os.O_RDWR if writable else os.O_RDONLY
            fd = os.open(path, access | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise CacheStale(f"the pool {name} is gone: {error.strerror}") from error
        try:
            _check_private(fd, name)
            header = Header.unpack(os.pread(fd, _HEADER.size, 0))
            if os.fstat(fd).st_size < header.size:
                raise TransferFailed(f"the pool {name} is cut short: {os.fstat(fd).st_size} of {header.size} bytes")
            return Segment(fd, path, header, owner=False, writable=writable)
        except BaseException:
            os.close(fd)
            raise

    @property
    def name(self) -> str:
        return self.path.name

    def owner_alive(self) -> bool:
        """Whether the process that made the file still runs (and has not closed it)."""
        if self._fd is None or self._owner:
            return self._fd is not None
        alone = _lock(self._fd, fcntl.LOCK_SH)
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        return not alone

    def close(self) -> None:
        """Unmap as soon as nobody looks into the mapping any more; the owner also removes the file."""
        if self._fd is None:
            return
        if self._owner:
            self.generations |= 1  # whoever still has it mapped sees every block as being written
            self.path.unlink(missing_ok=True)
            fcntl.flock(self._fd, fcntl.LOCK_UN)  # the mapping has a descriptor of its own and would keep the lock
        os.close(self._fd)
        self._fd = None
        self.generations, self.blocks = self.generations.copy(), memoryview(b"")


def segment_name(worker: str, epoch: str) -> str:
    if not _WORKER.fullmatch(worker):
        raise InvalidRequest(f"worker id {worker!r} must match {_WORKER.pattern}", param="worker")
    name = f"kvrelay-{os.getuid()}-{worker}-{epoch}"
    if not _NAME.fullmatch(name):
        raise InvalidRequest(f"epoch {epoch!r} must be 32 hex digits", param="epoch")
    return name


def reclaim_dead_segments(directory: Path = SHM) -> list[str]:
    """Remove this user's pool files whose owner is dead; the names removed. Safe beside workers that start or stop."""
    removed = []
    for path in sorted(directory.glob(f"kvrelay-{os.getuid()}-*")):
        if _NAME.fullmatch(path.name) and _reclaim(path):
            removed.append(path.name)
    return removed


def _reclaim(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        if not _taken_over(fd):
            return False
        path.unlink(missing_ok=True)
        return True
    finally:
        os.close(fd)


def _taken_over(fd: int) -> bool:
    """Whether the lock could be had: not from a living owner. Who only asks for the owner shares it for an instant."""
    for _ in range(TRIES):
        if _lock(fd, fcntl.LOCK_EX):
            return True
        if not _lock(fd, fcntl.LOCK_SH):
            return False
        fcntl.flock(fd, fcntl.LOCK_UN)
        time.sleep(BETWEEN_TRIES_S)
    return False


def _create_locked(path: Path) -> int:
    """The new file's descriptor, with the owner's lock on it. A reclaimer may take the file between its creation and
    the lock; then it has lost its name, and another is made."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
        if os.fstat(fd).st_nlink:
            return fd
        os.close(fd)


def _reserve(fd: int, size: int, directory: Path) -> None:
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        space = os.statvfs(directory)
        raise PoolMemoryError(
            f"a pool of {size} bytes does not fit into {directory}: {space.f_bavail * space.f_frsize} bytes are free "
            f"({error.strerror}); lower the pool's budget or enlarge {directory} (docker: --shm-size)"
        ) from error


def _map_in(memory: mmap.mmap) -> None:
    """Enter all pages into the page tables at once: a fault for each, as blocks are first written, would take longer
    than the writing. Without effect on a kernel that can't."""
    with contextlib.suppress(OSError):
        memory.madvise(_MADV_POPULATE_WRITE)


def _check_private(fd: int, name: str) -> None:
    info = os.fstat(fd)
    if info.st_uid != os.getuid() or stat.S_IMODE(info.st_mode) & 0o077 or not stat.S_ISREG(info.st_mode):
        raise TransferFailed(f"{name} must be a plain file of user {os.getuid()} with mode 0600")


def _lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _pages(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE) * _PAGE
