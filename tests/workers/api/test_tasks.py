"""`cancel_and_wait` returns once the task has cleaned up, however it reacts to the cancellation."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from workers.api.tasks import cancel_and_wait


class Stubborn:
    """Swallows a number of cancellations, then ends; fails at the end if it should."""

    def __init__(self, lost: int, error: Exception | None):
        self.lost = lost
        self.error = error
        self.cleaned_up = False

    async def run(self) -> None:
        for _ in range(self.lost):
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            self.cleaned_up = True
            if self.error:
                raise self.error


@pytest.mark.parametrize("error", [None, ValueError("planted")])
@pytest.mark.parametrize("lost", [0, 1, 3])
async def test_swallowed_cancellation_is_repeated(lost: int, error: Exception | None) -> None:
    stubborn = Stubborn(lost, error)
    task = asyncio.create_task(stubborn.run())
    await asyncio.sleep(0)
    async with asyncio.timeout(10):
        await cancel_and_wait(task, again_s=0.01)
    assert task.done() and stubborn.cleaned_up


async def test_cancelled_caller_cancels_the_task_once_more() -> None:
    stubborn = Stubborn(lost=1, error=None)
    task = asyncio.create_task(stubborn.run())
    await asyncio.sleep(0)
    ending = asyncio.create_task(cancel_and_wait(task))
    await asyncio.sleep(0.01)
    ending.cancel()
    await asyncio.wait({ending, task}, timeout=10)
    assert ending.cancelled() and stubborn.cleaned_up


async def test_finished_task_is_left_alone() -> None:
    task = asyncio.create_task(asyncio.sleep(0, "done"))
    await task
    await cancel_and_wait(task)
    assert task.result() == "done"
