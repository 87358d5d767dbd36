"""Tasks of the event loop: ended in good order, and counted, as workers and gateway alike tell in their metrics."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

AGAIN_S = 20.0  # a cancellation can get lost, where a library takes it for the end of a timeout of its own


def num_tasks() -> int:
    """Tasks of the running event loop; 0 where none runs."""
    try:
        return len(asyncio.all_tasks())
    except RuntimeError:
        return 0


async def cancel_and_wait(task: asyncio.Future[Any], *, again_s: float = AGAIN_S) -> None:
    """Cancels the task, and waits until it has cleaned up. How it ended is looked at, so that a failure is not reported
    as forgotten. Whoever waits for it can be cancelled meanwhile."""
    while task.cancel():
        try:
            await asyncio.wait({task}, timeout=again_s)
        except asyncio.CancelledError:
            task.cancel()  # nobody will ask again
            raise
    if not task.cancelled():
        task.exception()


@asynccontextmanager
async def repeating(work: Callable[[], Awaitable[None]], every_s: float) -> AsyncIterator[None]:
    """Within the block `work` is done again and again. At the end it is waited for, never cancelled: redis-py takes a
    cancellation for a failure of its own, and nobody would hear of it. It raises nothing."""
    ending = asyncio.Event()

    async def repeat() -> None:
        while not ending.is_set():
            await work()
            with suppress(TimeoutError):
                await asyncio.wait_for(ending.wait(), every_s)

    task = asyncio.create_task(repeat())
    try:
        yield
    finally:
        ending.set()
        await task
