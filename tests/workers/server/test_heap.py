"""Memory that nobody uses goes back to the system, also where it lies between what is in use (glibc)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.workers.server.support import Served, until
from workers.serving.worker import trim_heap_forever

PIECE_BYTES, NUM_PIECES = 64 * 1024, 1000  # each below what malloc takes from the system apart


def resident_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssAnon"))


@asynccontextmanager
async def kept_small() -> AsyncIterator[None]:
    keeping = asyncio.create_task(trim_heap_forever(0.02))
    yield
    keeping.cancel()
    await asyncio.wait([keeping])


async def test_gaps_go_back_to_the_system() -> None:
    pieces = [bytearray(b"x") * PIECE_BYTES for _ in range(NUM_PIECES)]
    fences = pieces[::10]
    del pieces
    before = resident_bytes()
    async with kept_small():
        await until(lambda: before - resident_bytes() > PIECE_BYTES * NUM_PIECES // 2)
    assert len(fences) == NUM_PIECES // 10, "they are in use, and hold the gaps apart"


async def test_a_worker_sees_to_it(served: Served) -> None:
    names = [getattr(task.get_coro(), "__qualname__", "") for task in asyncio.all_tasks()]
    assert names.count(trim_heap_forever.__qualname__) == 1
