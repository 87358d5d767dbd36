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
    """Calls `interrupt` between the copy and the second check."""

    def __init__(self, arena: Arena, interrupt: Callable[[], None]):
        super().__init__(arena.export(), arena.layout, arena.data, arena.generations)
        self._interrupt = interrupt

    def _synchronize(self) -> None:
        self._interrupt()


def rewrites(arena: Arena, block: int) -> Callable[[], None]:
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
def test_block_written_during_copy_is_stale(arena: Arena, block: int) -> None:
    reader = InterruptedReader(arena, rewrites(arena, block))
    with pytest.raises(CacheStale, match=f"block {block} is at generation 4, its ticket says 2"):
        reader.read([0, 1], [2, 2], 0, 8)


def test_write_begun_during_copy_is_stale(arena: Arena) -> None:
    reader = InterruptedReader(arena, lambda: arena.open([1]))
    with pytest.raises(CacheStale, match="block 1 is at generation 3"):
        reader.read([0, 1], [2, 2], 0, 8)


@pytest.mark.parametrize("generation", [0, 1, 3, 4])
def test_stale_block_is_not_copied(arena: Arena, generation: int) -> None:
    copied: list[bool] = []
    reader = InterruptedReader(arena, lambda: copied.append(True))
    with pytest.raises(CacheStale):
        reader.read([0, 1], [2, generation], 0, 8)
    assert not copied


def test_writes_to_other_blocks_do_not_matter(arena: Arena) -> None:
    for begin, end, block in ((0, 8, 2), (0, 4, 1), (4, 8, 0)):
        generations = arena.generations_of([0, 1])
        InterruptedReader(arena, rewrites(arena, block)).read([0, 1], generations, begin, end)


HERE = Site(transports=["inproc", "cuda_ipc", "shm", "tcp"], host="boot/21", process="p", gpus=["0000:01:00.0"])
ADDRESSES: dict[str, dict[str, Any]] = {
    "inproc": {"process": "p"},
    "cuda_ipc": {"host": "boot/21", "gpu": "0000:01:00.0"},
    "shm": {"host": "boot/21", "name": "n"},
    "tcp": {"address": "10.0.0.7", "port": 8201},
}


def export_of(kind: str, **address: str) -> PoolExport:
    return PoolExport(kind=kind, address=ADDRESSES.get(kind, {}) | address, num_blocks=1, epoch="e")


@pytest.mark.parametrize(
    ("exports", "site", "chosen"),
    [
        ([export_of("tcp"), export_of("shm")], HERE, ["shm", "tcp"]),
        ([export_of(kind) for kind in reversed(ADDRESSES)], HERE, ["inproc", "cuda_ipc", "shm", "tcp"]),
        ([export_of("shm", host="boot/22"), export_of("tcp")], HERE, ["tcp"]),  # another container of the same machine
        ([export_of("shm"), export_of("cuda_ipc", gpu="0000:02:00.0")], HERE, ["shm"]),  # another GPU
        ([export_of("inproc", process="q"), export_of("tcp")], HERE, ["tcp"]),
        ([export_of("cuda_ipc"), export_of("shm")], HERE.model_copy(update={"transports": ["shm", "tcp"]}), ["shm"]),
        ([export_of("pigeon"), export_of("tcp")], HERE, ["tcp"]),
    ],
)
def test_exports_are_chosen_by_what_both_sides_support(
    exports: list[PoolExport], site: Site, chosen: list[str]
) -> None:
    assert [export.kind for export in choose(exports, site)] == chosen


@pytest.mark.parametrize(
    ("exports", "message"),
    [
        ([export_of("shm", host="boot/22")], "the source offers shm on host boot/22; .* on host boot/21"),
        ([export_of("pigeon")], "offers pigeon; this worker supports inproc, cuda_ipc, shm, tcp"),
        ([], "offers none; this worker supports inproc"),
    ],
)
def test_no_common_transport_names_both_sides(exports: list[PoolExport], message: str) -> None:
    with pytest.raises(TransferFailed, match=message):
        choose(exports, HERE)


def test_worker_without_gpu_offers_no_cuda_ipc() -> None:
    here = site_here(cuda=False)
    assert here.transports == [kind for kind in TRANSPORTS if kind != "cuda_ipc"] and not here.gpus
    pool = HeapArena(LAYOUT, 1, new_epoch())
    assert choose([pool.export()], here) == [pool.export()]


def test_unknown_transport_is_rejected() -> None:
    with pytest.raises(TransferFailed, match="unknown transport 'pigeon'; known: inproc, cuda_ipc, shm, tcp"):
        load_transport("pigeon")


@pytest.mark.parametrize("kind", [kind for kind in TRANSPORTS if kind != "cuda_ipc"])
def test_transport_kind_matches_registry(kind: str) -> None:
    assert load_transport(kind).kind == kind
