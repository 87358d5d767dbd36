from __future__ import annotations

import fcntl
import gc
import os
import re
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.workers.pool.support import HOST_KINDS, LAYOUT, make_arena
from workers.api.errors import CacheStale, InvalidRequest, TransferFailed
from workers.api.schemas import KVLayout
from workers.pool import arena as arena_module
from workers.pool import create_arena, new_epoch
from workers.pool.arena import Arena
from workers.pool.blocks import block_bytes
from workers.pool.segment import Header, PoolMemoryError, Segment, reclaim_dead_segments


def test_generation_is_odd_during_write_and_higher_afterwards(arena: Arena) -> None:
    before = arena.generations_of([3, 5, 6])
    with arena.writing([3, 5]):
        assert arena.generations_of([3, 5, 6]) == [before[0] + 1, before[1] + 1, before[2]]
    assert arena.generations_of([3, 5, 6]) == [before[0] + 2, before[1] + 2, before[2]]


def test_failed_write_ends(arena: Arena) -> None:
    with pytest.raises(ZeroDivisionError), arena.writing([3]):
        raise ZeroDivisionError
    assert arena.generations_of([3]) == [2]


def test_block_has_one_writer(arena: Arena) -> None:
    with arena.writing([3]), pytest.raises(AssertionError, match="one writer"):
        arena.open([2, 3])


def test_clear_zeroes_blocks_and_ends_write(arena: Arena) -> None:
    arena.data.fill_(7.0)
    arena.open([1, 2])
    arena.clear([1, 2])
    assert not arena.data[[1, 2]].any()
    assert (arena.data[[0, 3]] == 7.0).all()
    assert arena.generations_of([1, 2]) == [2, 2]


def test_new_arena_is_zero(arena: Arena) -> None:
    assert not arena.data.any()
    assert not arena.generations.any()


@pytest.mark.parametrize("kind", HOST_KINDS)
def test_closed_arena_marks_every_block_as_being_written(kind: str, tmp_path: Path) -> None:
    arena = make_arena(kind, tmp_path)
    generations = arena.generations
    arena.close()
    arena.close()
    assert (generations & 1).all()


def test_failed_arena_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(segment: Segment, layout: KVLayout) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(arena_module, "segment_data", fail)
    with pytest.raises(RuntimeError, match="planted"):
        make_arena("shm", tmp_path)
    assert not list(tmp_path.iterdir())


def test_budget_is_rounded_down_to_blocks(tmp_path: Path) -> None:
    size = block_bytes(LAYOUT)
    arena = create_arena("inproc", LAYOUT, 3 * size + size - 1, worker="w", epoch=new_epoch(), directory=tmp_path)
    assert arena.num_blocks == 3
    with pytest.raises(InvalidRequest, match=f"one block of this layout needs {size}"):
        create_arena("inproc", LAYOUT, size - 1, worker="w", epoch=new_epoch())
    with pytest.raises(InvalidRequest, match="unknown pool kind 'disk'; known: inproc, shm, cuda_ipc"):
        create_arena("disk", LAYOUT, size, worker="w", epoch=new_epoch())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_uses_half_the_bytes(dtype: str, tmp_path: Path) -> None:
    layout = LAYOUT.model_copy(update={"dtype": dtype})
    assert 2 * block_bytes(layout) == block_bytes(LAYOUT)
    arena = make_arena("shm", tmp_path, layout=layout)
    assert arena.data.dtype == getattr(torch, dtype)
    arena.close()


# -- the file ------------------------------------------------------------------------------------------------------


@pytest.fixture
def segment(tmp_path: Path) -> Iterator[Segment]:
    segment = Segment.create("small-0", Header(4, 100, "ab" * 16), tmp_path)
    yield segment
    segment.close()


def test_pool_file_is_private_to_its_user(segment: Segment) -> None:
    assert segment.name == f"kvrelay-{os.getuid()}-small-0-{'ab' * 16}"
    assert stat.S_IMODE(segment.path.stat().st_mode) == 0o600


def test_file_mode_is_independent_of_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        segment = Segment.create("w", Header(1, 8, new_epoch()), tmp_path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(segment.path.stat().st_mode) == 0o600
    segment.close()


def test_file_accessible_to_others_is_rejected(segment: Segment, tmp_path: Path) -> None:
    segment.path.chmod(0o640)
    with pytest.raises(TransferFailed, match="mode 0600"):
        Segment.attach(segment.name, tmp_path)


def test_symlink_is_not_followed(segment: Segment, tmp_path: Path) -> None:
    link = tmp_path / segment.name.replace("ab" * 16, "cd" * 16)
    link.symlink_to(segment.path)
    with pytest.raises(CacheStale):
        Segment.attach(link.name, tmp_path)


@pytest.mark.parametrize("name", ["../etc/passwd", "kvrelay-0-w", "", "/dev/shm/kvrelay-0-w-" + "a" * 32, "x"])
def test_name_that_is_not_a_pools_is_rejected(name: str, tmp_path: Path) -> None:
    with pytest.raises(TransferFailed, match="is not the name of a pool's file"):
        Segment.attach(name, tmp_path)


def test_readers_cannot_write(segment: Segment, tmp_path: Path) -> None:
    reader = Segment.attach(segment.name, tmp_path)
    with pytest.raises(ValueError, match="read-only"):
        reader.generations[0] = 1
    with pytest.raises(TypeError, match="read-only"):
        reader.blocks[0] = 1
    reader.close()


def test_readers_see_writes_of_owner(segment: Segment, tmp_path: Path) -> None:
    reader = Segment.attach(segment.name, tmp_path)
    segment.generations[2] = 8
    assert reader.generations.tolist() == [0, 0, 8, 0]
    reader.close()


def test_close_removes_file_and_keeps_reader_memory(segment: Segment, tmp_path: Path) -> None:
    reader = Segment.attach(segment.name, tmp_path)
    assert reader.owner_alive() and segment.owner_alive()
    segment.close()
    assert not segment.path.exists()
    assert not reader.owner_alive() and not segment.owner_alive()
    assert (reader.generations & 1).all()
    reader.close()


def test_reader_close_keeps_file(segment: Segment, tmp_path: Path) -> None:
    Segment.attach(segment.name, tmp_path).close()
    assert segment.path.exists()


def test_foreign_or_truncated_file_is_rejected(segment: Segment, tmp_path: Path) -> None:
    name = segment.name
    with segment.path.open("r+b") as file:
        file.write(b"XXXX")
    with pytest.raises(TransferFailed, match="not a pool of version 1"):
        Segment.attach(name, tmp_path)
    short = tmp_path / name.replace("ab" * 16, "cd" * 16)
    short.write_bytes(Header(4, 100, "cd" * 16).pack())
    short.chmod(0o600)
    with pytest.raises(TransferFailed, match="truncated"):
        Segment.attach(short.name, tmp_path)
    short.write_bytes(b"")
    with pytest.raises(TransferFailed, match="this file has 0"):
        Segment.attach(short.name, tmp_path)


@pytest.mark.parametrize("worker", ["small--0", "-", "w.", "a-" * 32])
def test_every_allowed_worker_id_gives_a_usable_name(worker: str, tmp_path: Path) -> None:
    segment = Segment.create(worker, Header(1, 8, new_epoch()), tmp_path)
    Segment.attach(segment.name, tmp_path).close()
    segment.close()


@pytest.mark.parametrize("worker", ["", "a/b", "../x", "w" * 65])
def test_worker_id_unusable_in_file_name_is_rejected(worker: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="worker id"):
        Segment.create(worker, Header(1, 8, new_epoch()), tmp_path)


def test_missing_memory_is_rejected_at_creation(tmp_path: Path) -> None:
    """Writing to missing memory later would end the process."""
    with pytest.raises(PoolMemoryError, match="does not fit into .* bytes free"):
        Segment.create("w", Header(1, 1 << 60, new_epoch()), tmp_path)
    assert not list(tmp_path.iterdir())


def test_memory_is_reserved_at_creation(tmp_path: Path) -> None:
    segment = Segment.create("w", Header(1, 1 << 20, new_epoch()), tmp_path)
    assert segment.path.stat().st_blocks * 512 >= 1 << 20
    segment.close()


def test_new_segment_is_resident(segment: Segment) -> None:
    mappings = Path("/proc/self/smaps").read_text()
    segment_mapping = mappings[mappings.index(segment.name) :]
    size, resident = (re.search(rf"^{what}: +(\d+) kB$", segment_mapping, re.M) for what in ("Size", "Rss"))
    assert size and resident and int(resident[1]) == int(size[1]) > 0


def test_tensor_outlives_closed_segment(tmp_path: Path) -> None:
    arena = make_arena("shm", tmp_path)
    data, reader = arena.data, Segment.attach(str(arena.export().address["name"]), tmp_path)
    arena.close()
    assert not reader.owner_alive()  # the tensor keeps the mapping, but not the lock
    reader.close()
    del arena
    gc.collect()
    data.fill_(1.0)
    assert data.sum().item() == data.numel()


# -- dead owners ---------------------------------------------------------------------------------------------------

_OWNER = """
import sys
import threading
from pathlib import Path
from workers.pool.segment import Header, Segment
segment = Segment.create("other-1", Header(4, 100, sys.argv[2]), Path(sys.argv[1]))
segment.generations[:] = 6
print(segment.name, flush=True)
sys.stdin.read()
"""

_READER = """
import sys
import threading
from pathlib import Path
from workers.pool.segment import Segment
segment = Segment.attach(sys.argv[2], Path(sys.argv[1]))
print(segment.generations.tolist())
"""


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", _OWNER, str(tmp_path), new_epoch()],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with process:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()
        process.kill()


@pytest.mark.slow
def test_file_of_dead_owner_is_reclaimed(
    owner: tuple[subprocess.Popen[str], str], segment: Segment, tmp_path: Path
) -> None:
    process, name = owner
    assert reclaim_dead_segments(tmp_path) == []
    reader = Segment.attach(name, tmp_path)
    assert reader.owner_alive()
    process.send_signal(signal.SIGSTOP)  # frozen, not dead
    assert reclaim_dead_segments(tmp_path) == []
    process.kill()
    process.wait()
    assert not reader.owner_alive()
    assert reclaim_dead_segments(tmp_path) == [name]
    assert segment.path.exists() and not (tmp_path / name).exists()
    np.testing.assert_array_equal(reader.generations, 6)  # a reader keeps its mapping
    reader.close()


def test_reclaim_keeps_other_files(tmp_path: Path) -> None:
    for name in ("kvrelay-notes", f"kvrelay-{os.getuid()}-w-short", "psm_12345678"):
        (tmp_path / name).touch()
    assert reclaim_dead_segments(tmp_path) == []
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.slow
def test_reader_exit_keeps_file(segment: Segment, tmp_path: Path) -> None:
    """Python's SharedMemory would unlink it."""
    segment.generations[:] = [2, 4, 6, 8]
    run = subprocess.run(
        [sys.executable, "-c", _READER, str(tmp_path), segment.name], capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "[2, 4, 6, 8]"
    assert run.stderr == ""
    assert segment.path.exists()
    Segment.attach(segment.name, tmp_path).close()


def test_file_reclaimed_before_lock_is_created_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between its creation and the lock, the file looks like a dead owner's."""
    flock, reclaimed = fcntl.flock, list[list[str]]()

    def reclaim_first(fd: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        reclaimed.append(reclaim_dead_segments(tmp_path))
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", reclaim_first)
    segment = Segment.create("w", Header(1, 8, new_epoch()), tmp_path)
    assert reclaimed[-1] == [segment.name]
    Segment.attach(segment.name, tmp_path).close()
    segment.close()


@pytest.mark.slow
def test_reader_checking_owner_does_not_block_reclaim(owner: tuple[subprocess.Popen[str], str], tmp_path: Path) -> None:
    process, name = owner
    process.kill()
    process.wait()
    with (tmp_path / name).open("rb") as checking:
        fcntl.flock(checking, fcntl.LOCK_SH)
        timer = threading.Timer(0.02, fcntl.flock, (checking, fcntl.LOCK_UN))
        timer.start()
        assert reclaim_dead_segments(tmp_path) == [name]
        timer.join()
