"""asyncio tasks: cancel one and wait for it, repeat work, count what is running."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

AGAIN_S = 20.0  # a library may swallow a cancellation, taking it for the end of its own timeout


def num_tasks() -> int:
    """Return the number of tasks of the running event loop; 0 without a loop."""
    try:
        return len(asyncio.all_tasks())
    except RuntimeError:
        return 0


async def cancel_and_wait(task: asyncio.Future[Any], *, again_s: float = AGAIN_S) -> None:
    """Cancel a task and wait until it has ended; repeat the cancellation every `again_s`.

    Its exception is retrieved, so that asyncio does not log it. The caller can be cancelled while it waits.
    """
    while task.cancel():
        try:
            await asyncio.wait({task}, timeout=again_s)
        except asyncio.CancelledError:
            task.cancel()  # the caller will not repeat it
            raise
    if not task.cancelled():
        task.exception()


@asynccontextmanager
async def repeating(work: Callable[[], Awaitable[None]], every_s: float) -> AsyncIterator[None]:
    """Within the block, repeat `work` every `every_s`. `work` must not raise.

    At the end, the current run is awaited, never cancelled: redis-py takes a cancellation for a failure of its own.
    """
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
