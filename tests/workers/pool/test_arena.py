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


def test_a_generation_is_odd_while_its_block_is_written_and_higher_afterwards(arena: Arena) -> None:
    before = arena.generations_of([3, 5, 6])
    with arena.writing([3, 5]):
        assert arena.generations_of([3, 5, 6]) == [before[0] + 1, before[1] + 1, before[2]]
    assert arena.generations_of([3, 5, 6]) == [before[0] + 2, before[1] + 2, before[2]]


def test_a_write_that_fails_is_over_too(arena: Arena) -> None:
    with pytest.raises(ZeroDivisionError), arena.writing([3]):
        raise ZeroDivisionError
    assert arena.generations_of([3]) == [2]


def test_a_block_has_one_writer(arena: Arena) -> None:
    with arena.writing([3]), pytest.raises(AssertionError, match="one writer"):
        arena.open([2, 3])


def test_clearing_zeroes_and_ends_the_write(arena: Arena) -> None:
    arena.data.fill_(7.0)
    arena.open([1, 2])
    arena.clear([1, 2])
    assert not arena.data[[1, 2]].any()
    assert (arena.data[[0, 3]] == 7.0).all()
    assert arena.generations_of([1, 2]) == [2, 2]


def test_a_new_arena_is_zero(arena: Arena) -> None:
    assert not arena.data.any()
    assert not arena.generations.any()


@pytest.mark.parametrize("kind", HOST_KINDS)
def test_a_closed_arena_shows_every_block_as_being_written(kind: str, tmp_path: Path) -> None:
    arena = make_arena(kind, tmp_path)
    generations = arena.generations
    arena.close()
    arena.close()
    assert (generations & 1).all()


def test_an_arena_that_fails_in_the_making_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(segment: Segment, layout: KVLayout) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(arena_module, "segment_data", fail)
    with pytest.raises(RuntimeError, match="planted"):
        make_arena("shm", tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_budget_buys_whole_blocks(tmp_path: Path) -> None:
    size = block_bytes(LAYOUT)
    arena = create_arena("inproc", LAYOUT, 3 * size + size - 1, worker="w", epoch=new_epoch(), directory=tmp_path)
    assert arena.num_blocks == 3
    with pytest.raises(InvalidRequest, match=f"one block of this layout takes {size}"):
        create_arena("inproc", LAYOUT, size - 1, worker="w", epoch=new_epoch())
    with pytest.raises(InvalidRequest, match="unknown pool kind 'disk'; known: inproc, shm, cuda_ipc"):
        create_arena("disk", LAYOUT, size, worker="w", epoch=new_epoch())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_takes_half_the_bytes(dtype: str, tmp_path: Path) -> None:
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


def test_only_its_user_can_open_the_file(segment: Segment) -> None:
    assert segment.name == f"kvrelay-{os.getuid()}-small-0-{'ab' * 16}"
    assert stat.S_IMODE(segment.path.stat().st_mode) == 0o600


def test_mode_0600_does_not_depend_on_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        segment = Segment.create("w", Header(1, 8, new_epoch()), tmp_path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(segment.path.stat().st_mode) == 0o600
    segment.close()


def test_a_file_that_others_can_reach_is_not_opened(segment: Segment, tmp_path: Path) -> None:
    segment.path.chmod(0o640)
    with pytest.raises(TransferFailed, match="mode 0600"):
        Segment.attach(segment.name, tmp_path)


def test_a_link_in_place_of_the_file_is_not_followed(segment: Segment, tmp_path: Path) -> None:
    link = tmp_path / segment.name.replace("ab" * 16, "cd" * 16)
    link.symlink_to(segment.path)
    with pytest.raises(CacheStale):
        Segment.attach(link.name, tmp_path)


@pytest.mark.parametrize("name", ["../etc/passwd", "kvrelay-0-w", "", "/dev/shm/kvrelay-0-w-" + "a" * 32, "x"])
def test_only_a_pools_name_is_opened(name: str, tmp_path: Path) -> None:
    with pytest.raises(TransferFailed, match="does not name a pool's file"):
        Segment.attach(name, tmp_path)


def test_readers_cannot_write(segment: Segment, tmp_path: Path) -> None:
    reader = Segment.attach(segment.name, tmp_path)
    with pytest.raises(ValueError, match="read-only"):
        reader.generations[0] = 1
    with pytest.raises(TypeError, match="read-only"):
        reader.blocks[0] = 1
    reader.close()


def test_readers_see_the_owners_writes_at_once(segment: Segment, tmp_path: Path) -> None:
    reader = Segment.attach(segment.name, tmp_path)
    segment.generations[2] = 8
    assert reader.generations.tolist() == [0, 0, 8, 0]
    reader.close()


def test_closing_removes_the_file_and_a_reader_keeps_its_memory(segment: Segment, tmp_path: Path) -> None:
    reader = Segment.attach(segment.name, tmp_path)
    assert reader.owner_alive() and segment.owner_alive()
    segment.close()
    assert not segment.path.exists()
    assert not reader.owner_alive() and not segment.owner_alive()
    assert (reader.generations & 1).all()
    reader.close()


def test_a_readers_close_removes_nothing(segment: Segment, tmp_path: Path) -> None:
    Segment.attach(segment.name, tmp_path).close()
    assert segment.path.exists()


def test_a_file_of_another_kind_or_cut_short_is_refused(segment: Segment, tmp_path: Path) -> None:
    name = segment.name
    with segment.path.open("r+b") as file:
        file.write(b"XXXX")
    with pytest.raises(TransferFailed, match="not a pool of version 1"):
        Segment.attach(name, tmp_path)
    short = tmp_path / name.replace("ab" * 16, "cd" * 16)
    short.write_bytes(Header(4, 100, "cd" * 16).pack())
    short.chmod(0o600)
    with pytest.raises(TransferFailed, match="cut short"):
        Segment.attach(short.name, tmp_path)
    short.write_bytes(b"")
    with pytest.raises(TransferFailed, match="this file has 0"):
        Segment.attach(short.name, tmp_path)


@pytest.mark.parametrize("worker", ["small--0", "-", "w.", "a-" * 32])
def test_every_id_that_the_settings_allow_makes_a_file_that_is_found_again(worker: str, tmp_path: Path) -> None:
    segment = Segment.create(worker, Header(1, 8, new_epoch()), tmp_path)
    Segment.attach(segment.name, tmp_path).close()
    segment.close()


@pytest.mark.parametrize("worker", ["", "a/b", "../x", "w" * 65])
def test_a_worker_id_that_makes_no_file_name_is_refused(worker: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="worker id"):
        Segment.create(worker, Header(1, 8, new_epoch()), tmp_path)


def test_memory_that_is_not_there_is_refused_at_the_start(tmp_path: Path) -> None:
    """Taken when the pool is made: written to later, memory that is missing would end the process."""
    with pytest.raises(PoolMemoryError, match="does not fit into .* bytes are free"):
        Segment.create("w", Header(1, 1 << 60, new_epoch()), tmp_path)
    assert not list(tmp_path.iterdir())


def test_memory_is_reserved_and_not_merely_promised(tmp_path: Path) -> None:
    segment = Segment.create("w", Header(1, 1 << 20, new_epoch()), tmp_path)
    assert segment.path.stat().st_blocks * 512 >= 1 << 20
    segment.close()


def test_a_new_segments_pages_are_mapped(segment: Segment) -> None:
    mappings = Path("/proc/self/smaps").read_text()
    of_ours = mappings[mappings.index(segment.name) :]
    size, resident = (re.search(rf"^{what}: +(\d+) kB$", of_ours, re.M) for what in ("Size", "Rss"))
    assert size and resident and int(resident[1]) == int(size[1]) > 0


def test_a_tensor_outlives_its_closed_segment(tmp_path: Path) -> None:
    arena = make_arena("shm", tmp_path)
    data, reader = arena.data, Segment.attach(str(arena.export().address["name"]), tmp_path)
    arena.close()
    assert not reader.owner_alive()  # the mapping that the tensor keeps does not keep the lock
    reader.close()
    del arena
    gc.collect()
    data.fill_(1.0)
    assert data.sum().item() == data.numel()


# -- whose owner is dead --------------------------------------------------------------------------------------------

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


def test_a_dead_owners_file_is_reclaimed_and_a_live_ones_kept(
    owner: tuple[subprocess.Popen[str], str], segment: Segment, tmp_path: Path
) -> None:
    process, name = owner
    assert reclaim_dead_segments(tmp_path) == []
    reader = Segment.attach(name, tmp_path)
    assert reader.owner_alive()
    process.send_signal(signal.SIGSTOP)  # frozen is not dead
    assert reclaim_dead_segments(tmp_path) == []
    process.kill()
    process.wait()
    assert not reader.owner_alive()
    assert reclaim_dead_segments(tmp_path) == [name]
    assert segment.path.exists() and not (tmp_path / name).exists()
    np.testing.assert_array_equal(reader.generations, 6)  # what a reader has mapped stays
    reader.close()


def test_reclaiming_leaves_other_files_alone(tmp_path: Path) -> None:
    for name in ("kvrelay-notes", f"kvrelay-{os.getuid()}-w-short", "psm_12345678"):
        (tmp_path / name).touch()
    assert reclaim_dead_segments(tmp_path) == []
    assert len(list(tmp_path.iterdir())) == 3


def test_a_readers_exit_leaves_the_owners_memory(segment: Segment, tmp_path: Path) -> None:
    """Python's own SharedMemory would unlink it here."""
    segment.generations[:] = [2, 4, 6, 8]
    run = subprocess.run(
        [sys.executable, "-c", _READER, str(tmp_path), segment.name], capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "[2, 4, 6, 8]"
    assert run.stderr == ""
    assert segment.path.exists()
    Segment.attach(segment.name, tmp_path).close()


def test_a_file_reclaimed_before_its_owner_had_the_lock_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between making the file and locking it lies an instant in which it looks like a dead owner's."""
    flock, reclaimed = fcntl.flock, list[list[str]]()

    def reclaimed_first(fd: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        reclaimed.append(reclaim_dead_segments(tmp_path))
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", reclaimed_first)
    made = Segment.create("w", Header(1, 8, new_epoch()), tmp_path)
    assert reclaimed[-1] == [made.name]
    Segment.attach(made.name, tmp_path).close()
    made.close()


def test_who_only_looks_for_the_owner_does_not_keep_a_dead_ones_file(
    owner: tuple[subprocess.Popen[str], str], tmp_path: Path
) -> None:
    process, name = owner
    process.kill()
    process.wait()
    with (tmp_path / name).open("rb") as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        timer = threading.Timer(0.02, fcntl.flock, (looking, fcntl.LOCK_UN))
        timer.start()
        assert reclaim_dead_segments(tmp_path) == [name]
        timer.join()
