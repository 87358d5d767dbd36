"""`Batcher`: which rows a step runs, in which order, and what a cancellation or an error does."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from workers.engines.scheduling import Batcher


class Steps:
    """Steps that last while `running` is clear. The result of a row is its double."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.priorities: list[int] = []
        self.running = asyncio.Event()
        self.running.set()
        self.error: Exception | None = None
        self.poison: int | None = None
        self.wrong: dict[int, Exception] = {}

    async def run(self, rows: Sequence[int], priority: int) -> list[int | Exception]:
        self.batches.append(list(rows))
        self.priorities.append(priority)
        await asyncio.shield(asyncio.ensure_future(self.running.wait()))
        if self.error is not None:
            raise self.error
        if self.poison in rows:
            raise RuntimeError(f"{self.poison} breaks the step")
        return [self.wrong.get(row, 2 * row) for row in rows]


@pytest.fixture
def steps() -> Steps:
    return Steps()


async def test_concurrent_rows_share_every_step(steps: Steps) -> None:
    batcher = Batcher(steps.run, max_rows=4)

    async def answer(first: int) -> int:
        token = first
        for _ in range(3):
            token = await batcher.join(token)
        return token

    assert await asyncio.gather(*(answer(n) for n in (1, 10, 100))) == [8, 80, 800]
    assert steps.batches == [[1, 10, 100], [2, 20, 200], [4, 40, 400]]


async def test_row_arriving_during_step_joins_the_next(steps: Steps) -> None:
    batcher = Batcher(steps.run, max_rows=4)

    async def answer() -> None:
        await batcher.join(1)
        await batcher.join(2)

    steps.running.clear()
    first = asyncio.create_task(answer())
    await asyncio.sleep(0.01)
    second = asyncio.create_task(batcher.join(7))
    await asyncio.sleep(0.01)
    steps.running.set()
    await asyncio.gather(first, second)
    assert steps.batches in ([[1], [7, 2]], [[1], [2, 7]])


async def test_rows_above_max_take_turns_by_priority(steps: Steps) -> None:
    batcher = Batcher(steps.run, max_rows=2)
    steps.running.clear()
    joined = [asyncio.create_task(batcher.join(n, priority=priority)) for n, priority in enumerate((0, 0, 0, 5, -10))]
    await asyncio.sleep(0.01)
    steps.running.set()
    assert await asyncio.gather(*joined) == [0, 2, 4, 6, 8]
    assert steps.batches == [[3, 0], [1, 2], [4]]
    assert steps.priorities == [5, 0, -10]


async def test_row_cancelled_before_step_is_not_run(steps: Steps) -> None:
    batcher = Batcher(steps.run, max_rows=1)
    steps.running.clear()
    kept, cancelled = (asyncio.create_task(batcher.join(n)) for n in (1, 2))
    await asyncio.sleep(0.01)
    cancelled.cancel()
    await asyncio.wait([cancelled])
    steps.running.set()
    assert await kept == 2 and cancelled.cancelled() and steps.batches == [[1]]


async def test_row_cancelled_during_step_waits_for_its_end(steps: Steps) -> None:
    batcher = Batcher(steps.run, max_rows=2)
    steps.running.clear()
    kept, cancelled = (asyncio.create_task(batcher.join(n)) for n in (1, 2))
    await asyncio.sleep(0.01)
    for _ in range(2):
        cancelled.cancel()
        await asyncio.sleep(0.01)
    assert not cancelled.done()  # the step still writes to its memory
    steps.running.set()
    await asyncio.wait([cancelled])
    assert cancelled.cancelled() and await kept == 2


async def test_failed_step_fails_only_its_rows(steps: Steps) -> None:
    batcher = Batcher(steps.run, max_rows=2)
    steps.error = RuntimeError("planted")
    results = await asyncio.gather(batcher.join(1), batcher.join(2), return_exceptions=True)
    assert [str(error) for error in results] == ["planted", "planted"]
    steps.error = None
    assert await batcher.join(3) == 6


async def test_row_error_reaches_only_that_row(steps: Steps) -> None:
    batcher = Batcher(steps.run, max_rows=3)
    steps.wrong[2] = RuntimeError("planted")
    results = await asyncio.gather(*(batcher.join(n) for n in (1, 2, 3)), return_exceptions=True)
    assert results == [2, steps.wrong[2], 6] and steps.batches == [[1, 2, 3]]


async def test_row_that_breaks_the_step_fails_alone(steps: Steps) -> None:
    batcher = Batcher(steps.run, max_rows=3)
    steps.poison = 2
    results = await asyncio.gather(*(batcher.join(n) for n in (1, 2, 3)), return_exceptions=True)
    assert (results[0], str(results[1]), results[2]) == (2, "2 breaks the step", 6)
    assert steps.batches == [[1, 2, 3], [1], [2], [3]]


async def test_row_cancelled_in_failed_step_is_not_retried(steps: Steps) -> None:
    batcher = Batcher(steps.run, max_rows=2)
    steps.poison = 1
    steps.running.clear()
    kept, cancelled = (asyncio.create_task(batcher.join(n)) for n in (1, 2))
    await asyncio.sleep(0.01)
    cancelled.cancel()
    await asyncio.sleep(0.01)
    steps.running.set()
    await asyncio.wait([kept, cancelled])
    assert cancelled.cancelled() and steps.batches == [[1, 2], [1]]
