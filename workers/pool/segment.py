"""`Segment`: a pool's file in shared memory. It holds the generations of the blocks and, on the CPU, the blocks.

    page 0      header: magic, version, number of blocks, bytes per block, offset of the blocks, epoch
    page 1..    generations, one int64 per block; odd while the block is being written
    ..end       blocks; none if they are in a GPU's memory

The owner holds an exclusive `flock` on the file while it lives. The kernel releases it however the owner ends, and a
reused pid misleads nobody. The file is never truncated, so no reader's mapping faults. Its memory is reserved at
creation, so no write of the owner's faults.
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
_MADV_POPULATE_WRITE = 23  # since Linux 5.14; not in Python's mmap yet
LOCK_TRIES, LOCK_RETRY_S = 50, 0.002
_WORKER = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_NAME = re.compile(rf"kvrelay-\d+-{_WORKER.pattern}-[0-9a-f]{{32}}")

Generations = npt.NDArray[np.int64]


class PoolMemoryError(KvrelayError):
    """The memory for a pool is not available; the message says how much is."""

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
        return _HEADER.pack(_MAGIC, _VERSION, self.num_blocks, self.block_bytes, self.data_offset, self.epoch.encode())

    @staticmethod
    def unpack(raw: bytes) -> Header:
        if len(raw) < _HEADER.size:
            raise TransferFailed(f"a pool's file begins with {_HEADER.size} bytes of header; this file has {len(raw)}")
        magic, version, num_blocks, block_bytes, _, epoch = _HEADER.unpack(raw[: _HEADER.size])
        if magic != _MAGIC or version != _VERSION:
            raise TransferFailed(f"not a pool of version {_VERSION}: {magic!r}, version {version}")
        return Header(num_blocks, block_bytes, epoch.decode())


class Segment:
    """A mapped pool file: writable for its owner (`create`), read-only for others (`attach`) unless requested."""

    def __init__(self, fd: int, path: Path, header: Header, *, owner: bool, writable: bool = False):
        self.path = path
        self.header = header
        self._fd: int | None = fd
        self._owner = owner
        access = mmap.ACCESS_WRITE if owner or writable else mmap.ACCESS_READ
        memory = mmap.mmap(fd, header.size, access=access)
        if owner:
            with contextlib.suppress(OSError):  # without effect on older kernels
                # Fault in all pages at once: one fault per page, as blocks are first written, would take longer than
                # the writing.
                memory.madvise(_MADV_POPULATE_WRITE)
        self.generations: Generations = np.frombuffer(memory, np.int64, header.num_blocks, _PAGE)
        self.blocks = memoryview(memory)[header.data_offset :]

    @staticmethod
    def create(worker: str, header: Header, directory: Path = SHM) -> Segment:
        """Create the file `kvrelay-<uid>-<worker>-<epoch>`, mode 0600, locked by this process. Raises
        `PoolMemoryError`."""
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
        """Map another process's file; `writable` to write blocks on behalf of its owner. Raises `TransferFailed` for a
        name that is not a pool's and a file that other users can access, `CacheStale` if the file is gone."""
        if not _NAME.fullmatch(name):
            raise TransferFailed(f"{name!r} is not the name of a pool's file (kvrelay-<uid>-<worker>-<epoch>)")
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
                raise TransferFailed(f"the pool {name} is truncated: {os.fstat(fd).st_size} of {header.size} bytes")
            return Segment(fd, path, header, owner=False, writable=writable)
        except BaseException:
            os.close(fd)
            raise

    @property
    def name(self) -> str:
        return self.path.name

    def owner_alive(self) -> bool:
        """Return whether the process that created the file still runs and has not closed it."""
        if self._fd is None or self._owner:
            return self._fd is not None
        is_unowned = _lock(self._fd, fcntl.LOCK_SH)
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        return not is_unowned

    def close(self) -> None:
        """Unmap once no tensor refers to the mapping; the owner also removes the file. Idempotent."""
        if self._fd is None:
            return
        if self._owner:
            self.generations |= 1  # readers that still map the file see every block as being written
            self.path.unlink(missing_ok=True)
            fcntl.flock(self._fd, fcntl.LOCK_UN)  # the mapping has its own descriptor and would keep the lock
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
    """Remove this user's pool files whose owner is dead and return their names. Safe while workers start or stop."""
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
        for _ in range(LOCK_TRIES):
            if _lock(fd, fcntl.LOCK_EX):
                path.unlink(missing_ok=True)
                return True
            if not _lock(fd, fcntl.LOCK_SH):
                return False  # a living owner holds it
            fcntl.flock(fd, fcntl.LOCK_UN)
            time.sleep(LOCK_RETRY_S)  # a reader that checks for the owner shares the lock for an instant
        return False
    finally:
        os.close(fd)


def _create_locked(path: Path) -> int:
    """Create the file and lock it as its owner. If a reclaimer removes it between the two, create it again."""
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
            f"a pool of {size} bytes does not fit into {directory}, which has "
            f"{space.f_bavail * space.f_frsize} bytes free ({error.strerror}); lower the pool's budget or enlarge "
            f"{directory} (docker: --shm-size)"
        ) from error


def _check_private(fd: int, name: str) -> None:
    info = os.fstat(fd)
    if info.st_uid != os.getuid() or stat.S_IMODE(info.st_mode) & 0o077 or not stat.S_ISREG(info.st_mode):
        raise TransferFailed(f"{name} must be a regular file of user {os.getuid()} with mode 0600")


def _lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _pages(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE) * _PAGE
