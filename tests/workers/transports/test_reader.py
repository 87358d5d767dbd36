from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.workers.pool.support import LAYOUT, random_kv
from workers.api.errors import CacheStale, TransferFailed
from workers.api.schemas import PoolExport, Site
from workers.pool import new_epoch
from workers.pool.arena import Arena, HeapArena
from workers.pool.blocks import copy_in
from workers.transports import TRANSPORTS, choose, load_transport, site_here
from workers.transports.base import MemoryReader


class InterruptedReader(MemoryReader):
    """Something happens between the copy and the second look."""

    def __init__(self, arena: Arena, interrupt: Callable[[], None]):
        super().__init__(arena.export(), arena.layout, arena.data, arena.generations)
        self._interrupt = interrupt

    def _synchronize(self) -> None:
        self._interrupt()


def rewritten(arena: Arena, block: int) -> Callable[[], None]:
    def rewrite() -> None:
        with arena.writing([block]):
            arena.data[block].fill_(1.0)

    return rewrite


@pytest.fixture
def arena() -> Arena:
    arena = HeapArena(LAYOUT, 4, new_epoch())
    with arena.writing([0, 1]):
        copy_in(arena.data, [0, 1], random_kv(0, 8))
    return arena


@pytest.mark.parametrize("block", [0, 1])
def test_a_block_written_during_the_copy_makes_it_stale(arena: Arena, block: int) -> None:
    reader = InterruptedReader(arena, rewritten(arena, block))
    with pytest.raises(CacheStale, match=f"block {block} is at generation 4, its ticket says 2"):
        reader.read([0, 1], [2, 2], 0, 8)


def test_a_write_that_began_during_the_copy_makes_it_stale(arena: Arena) -> None:
    reader = InterruptedReader(arena, lambda: arena.open([1]))
    with pytest.raises(CacheStale, match="block 1 is at generation 3"):
        reader.read([0, 1], [2, 2], 0, 8)


@pytest.mark.parametrize("generation", [0, 1, 3, 4])
def test_what_is_stale_beforehand_is_not_even_copied(arena: Arena, generation: int) -> None:
    copied: list[bool] = []
    reader = InterruptedReader(arena, lambda: copied.append(True))
    with pytest.raises(CacheStale):
        reader.read([0, 1], [2, generation], 0, 8)
    assert not copied


def test_other_blocks_may_be_written_meanwhile(arena: Arena) -> None:
    for begin, end, block in ((0, 8, 2), (0, 4, 1), (4, 8, 0)):
        generations = arena.generations_of([0, 1])
        InterruptedReader(arena, rewritten(arena, block)).read([0, 1], generations, begin, end)


HERE = Site(transports=["inproc", "cuda_ipc", "shm", "tcp"], host="boot/21", process="p", gpus=["0000:01:00.0"])
WAYS: dict[str, dict[str, Any]] = {
    "inproc": {"process": "p"},
    "cuda_ipc": {"host": "boot/21", "gpu": "0000:01:00.0"},
    "shm": {"host": "boot/21", "name": "n"},
    "tcp": {"address": "10.0.0.7", "port": 8201},
}


def way(kind: str, **address: str) -> PoolExport:
    return PoolExport(kind=kind, address=WAYS.get(kind, {}) | address, num_blocks=1, epoch="e")


@pytest.mark.parametrize(
    ("exports", "site", "chosen"),
    [
        ([way("tcp"), way("shm")], HERE, ["shm", "tcp"]),
        ([way(kind) for kind in reversed(WAYS)], HERE, ["inproc", "cuda_ipc", "shm", "tcp"]),
        ([way("shm", host="boot/22"), way("tcp")], HERE, ["tcp"]),  # another container of the same machine
        ([way("shm"), way("cuda_ipc", gpu="0000:02:00.0")], HERE, ["shm"]),  # a GPU that this one does not see
        ([way("inproc", process="q"), way("tcp")], HERE, ["tcp"]),
        ([way("cuda_ipc"), way("shm")], HERE.model_copy(update={"transports": ["shm", "tcp"]}), ["shm"]),
        ([way("pigeon"), way("tcp")], HERE, ["tcp"]),
    ],
)
def test_ways_to_a_pool_are_chosen_by_what_both_can(
    exports: list[PoolExport], site: Site, chosen: list[str]
) -> None:
    assert [export.kind for export in choose(exports, site)] == chosen


@pytest.mark.parametrize(
    ("exports", "says"),
    [
        ([way("shm", host="boot/22")], "the source offers shm on host boot/22; .* on host boot/21"),
        ([way("pigeon")], "offers pigeon; this worker reads inproc, cuda_ipc, shm, tcp"),
        ([], "offers none; this worker reads inproc"),
    ],
)
def test_without_a_way_both_sides_are_named(exports: list[PoolExport], says: str) -> None:
    with pytest.raises(TransferFailed, match=says):
        choose(exports, HERE)


def test_a_worker_without_a_gpu_reads_no_gpus_memory() -> None:
    here = site_here(cuda=False)
    assert here.transports == [kind for kind in TRANSPORTS if kind != "cuda_ipc"] and not here.gpus
    pool = HeapArena(LAYOUT, 1, new_epoch())
    assert choose([pool.export()], here) == [pool.export()]


def test_an_unknown_transport_is_refused_by_name() -> None:
    with pytest.raises(TransferFailed, match="unknown transport 'pigeon'; known: inproc, cuda_ipc, shm, tcp"):
        load_transport("pigeon")


@pytest.mark.parametrize("kind", [kind for kind in TRANSPORTS if kind != "cuda_ipc"])
def test_a_transport_bears_the_name_it_is_listed_under(kind: str) -> None:
    assert load_transport(kind).kind == kind
