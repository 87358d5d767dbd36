from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.workers.pool.support import LAYOUT, random_kv
from workers.api.errors import CacheStale, TransferFailed
from workers.pool.arena import Arena, HeapArena, new_epoch
from workers.pool.blocks import copy_in
from workers.transports import TRANSPORTS, choose, load_transport, readable_transports
from workers.transports.base import Reader


class InterruptedReader(Reader):
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


@pytest.mark.parametrize(
    ("offered", "readable", "chosen"),
    [
        (["shm"], ["inproc", "shm"], "shm"),
        (["shm", "cuda_ipc"], ["inproc", "cuda_ipc", "shm"], "cuda_ipc"),
        (["shm", "cuda_ipc"], ["shm"], "shm"),
        (["shm", "inproc"], ["shm", "inproc"], "inproc"),
    ],
)
def test_the_fastest_common_transport_is_chosen(offered: list[str], readable: list[str], chosen: str) -> None:
    assert choose(offered, readable) == chosen


@pytest.mark.parametrize(("offered", "readable"), [(["cuda_ipc"], ["shm"]), (["pigeon"], ["shm"]), ([], ["shm"])])
def test_without_a_common_transport_both_sides_are_named(offered: list[str], readable: list[str]) -> None:
    with pytest.raises(TransferFailed, match=f"offers {', '.join(offered) or 'none'}; this worker reads shm"):
        choose(offered, readable)


def test_a_worker_without_a_gpu_reads_no_gpus_memory() -> None:
    assert readable_transports(cuda=False) == ["inproc", "shm"]
    assert readable_transports(cuda=True) == list(TRANSPORTS)


def test_an_unknown_transport_is_refused_by_name() -> None:
    with pytest.raises(TransferFailed, match="unknown transport 'pigeon'; known: inproc, cuda_ipc, shm"):
        load_transport("pigeon")


@pytest.mark.parametrize("kind", [kind for kind in TRANSPORTS if kind != "cuda_ipc"])
def test_a_transport_bears_the_name_it_is_listed_under(kind: str) -> None:
    assert load_transport(kind).kind == kind
