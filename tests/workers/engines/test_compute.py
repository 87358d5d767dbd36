"""The compute thread: order, cancellation, errors, shutdown."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncIterator, Callable
from functools import partial

import pytest

from workers.api.errors import WorkerUnavailable
from workers.engines.scheduling import Compute


class BlockingStep:
    """A step that runs until `finish`."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self._finished = threading.Event()

    def __call__(self) -> None:
        self.entered.set()
        self._finished.wait(10)

    def finish(self) -> None:
        self._finished.set()

    async def running(self) -> None:
        await asyncio.to_thread(self.entered.wait, 10)


@pytest.fixture
async def compute() -> AsyncIterator[Compute]:
    compute = Compute()
    yield compute
    await asyncio.to_thread(compute.close)


async def test_steps_run_by_priority_then_arrival(compute: Compute) -> None:
    order: list[str] = []

    def note(name: str) -> Callable[[], None]:
        return lambda: order.append(name)

    blocker = BlockingStep()
    blocking = asyncio.create_task(compute.run(blocker))
    await blocker.running()
    steps = [("a", 0), ("b", 0), ("urgent", 5), ("late", -1), ("c", 0)]
    waiting = [asyncio.create_task(compute.run(note(name), priority=priority)) for name, priority in steps]
    await asyncio.sleep(0)
    assert order == []
    blocker.finish()
    await asyncio.gather(blocking, *waiting)
    assert order == ["urgent", "a", "b", "c", "late"]


async def test_steps_of_two_requests_interleave(compute: Compute) -> None:
    order: list[str] = []

    async def request(name: str) -> None:
        for _ in range(3):
            await compute.run(lambda: order.append(name))

    blocker = BlockingStep()
    blocking = asyncio.create_task(compute.run(blocker))
    await blocker.running()
    requests = [asyncio.create_task(request(name)) for name in "ab"]
    await asyncio.sleep(0)
    blocker.finish()
    await asyncio.gather(blocking, *requests)
    assert order == ["a", "b", "a", "b", "a", "b"]


async def test_queued_step_is_dropped_on_cancellation(compute: Compute) -> None:
    ran: list[int] = []
    blocker = BlockingStep()
    blocking = asyncio.create_task(compute.run(blocker))
    await blocker.running()
    waiting = asyncio.create_task(compute.run(lambda: ran.append(1)))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    blocker.finish()
    await blocking
    await compute.run(lambda: None)
    assert waiting.cancelled() and not ran


async def test_running_step_is_awaited_on_cancellation(compute: Compute) -> None:
    blocker = BlockingStep()
    running = asyncio.create_task(compute.run(blocker))
    await blocker.running()
    for _ in range(3):  # however often it is cancelled
        running.cancel()
        await asyncio.sleep(0.01)
        assert not running.done()
    blocker.finish()
    await asyncio.wait([running])
    assert running.cancelled()


async def test_step_error_reaches_caller(compute: Compute) -> None:
    def fail() -> None:
        raise ZeroDivisionError("planted")

    with pytest.raises(ZeroDivisionError, match="planted"):
        await compute.run(fail)
    assert await compute.run(lambda: 7) == 7


async def test_finished_step_holds_no_references(compute: Compute) -> None:
    class Memory:
        pass

    memory = Memory()
    alive = weakref.ref(memory)
    await compute.run(partial(id, memory))
    del memory
    gc.collect()
    await asyncio.sleep(0.05)
    gc.collect()
    assert alive() is None


async def test_close_fails_queued_and_new_steps() -> None:
    compute = Compute()
    blocker = BlockingStep()
    blocking = asyncio.create_task(compute.run(blocker))
    await blocker.running()
    waiting = asyncio.create_task(compute.run(lambda: None))
    await asyncio.sleep(0)
    closing = asyncio.create_task(asyncio.to_thread(compute.close))
    with pytest.raises(WorkerUnavailable):
        await waiting
    blocker.finish()
    await asyncio.gather(blocking, closing)
    with pytest.raises(WorkerUnavailable, match="stopped"):
        await compute.run(lambda: None)
