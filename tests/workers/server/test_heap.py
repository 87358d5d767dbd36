"""Free heap memory returns to the system, also between blocks in use (glibc)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.workers.server.support import ServedWorker, until
from workers.serving.worker import trim_heap_forever

PIECE_BYTES, NUM_PIECES = 64 * 1024, 1000  # below malloc's mmap threshold


def resident_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssAnon"))


@asynccontextmanager
async def trimming() -> AsyncIterator[None]:
    task = asyncio.create_task(trim_heap_forever(0.02))
    yield
    task.cancel()
    await asyncio.wait([task])


async def test_trim_returns_gaps_to_the_system() -> None:
    pieces = [bytearray(b"x") * PIECE_BYTES for _ in range(NUM_PIECES)]
    fences = pieces[::10]
    del pieces
    before = resident_bytes()
    async with trimming():
        await until(lambda: before - resident_bytes() > PIECE_BYTES * NUM_PIECES // 2)
    assert len(fences) == NUM_PIECES // 10, "the fences must stay allocated between the gaps"


async def test_worker_runs_one_heap_trim_task(served: ServedWorker) -> None:
    names = [getattr(task.get_coro(), "__qualname__", "") for task in asyncio.all_tasks()]
    assert names.count(trim_heap_forever.__qualname__) == 1
