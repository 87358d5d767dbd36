"""The compute thread: order, cancellation, errors, end."""

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


class Gate:
    """A step that runs until it is opened."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self._open = threading.Event()

    def step(self) -> None:
        self.entered.set()
        self._open.wait(10)

    def open(self) -> None:
        self._open.set()

    async def running(self) -> None:
        await asyncio.to_thread(self.entered.wait, 10)


@pytest.fixture
async def compute() -> AsyncIterator[Compute]:
    compute = Compute()
    yield compute
    await asyncio.to_thread(compute.close)


async def test_steps_run_by_priority_and_then_by_arrival(compute: Compute) -> None:
    order: list[str] = []

    def note(name: str) -> Callable[[], None]:
        return lambda: order.append(name)

    gate = Gate()
    blocking = asyncio.create_task(compute.run(gate.step))
    await gate.running()
    steps = [("a", 0), ("b", 0), ("urgent", 5), ("late", -1), ("c", 0)]
    waiting = [asyncio.create_task(compute.run(note(name), priority=priority)) for name, priority in steps]
    await asyncio.sleep(0)
    assert order == []
    gate.open()
    await asyncio.gather(blocking, *waiting)
    assert order == ["urgent", "a", "b", "c", "late"]


async def test_steps_of_two_requests_take_turns(compute: Compute) -> None:
    order: list[str] = []

    async def request(name: str) -> None:
        for _ in range(3):
            await compute.run(lambda: order.append(name))

    gate = Gate()
    blocking = asyncio.create_task(compute.run(gate.step))
    await gate.running()
    requests = [asyncio.create_task(request(name)) for name in "ab"]
    await asyncio.sleep(0)
    gate.open()
    await asyncio.gather(blocking, *requests)
    assert order == ["a", "b", "a", "b", "a", "b"]


async def test_a_step_that_has_not_begun_is_dropped(compute: Compute) -> None:
    ran: list[int] = []
    gate = Gate()
    blocking = asyncio.create_task(compute.run(gate.step))
    await gate.running()
    waiting = asyncio.create_task(compute.run(lambda: ran.append(1)))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    gate.open()
    await blocking
    await compute.run(lambda: None)
    assert waiting.cancelled() and not ran


async def test_a_step_that_runs_is_waited_for(compute: Compute) -> None:
    gate = Gate()
    running = asyncio.create_task(compute.run(gate.step))
    await gate.running()
    for _ in range(3):  # however often it is cancelled
        running.cancel()
        await asyncio.sleep(0.01)
        assert not running.done()
    gate.open()
    await asyncio.wait([running])
    assert running.cancelled()


async def test_errors_reach_the_caller(compute: Compute) -> None:
    def fail() -> None:
        raise ZeroDivisionError("planted")

    with pytest.raises(ZeroDivisionError, match="planted"):
        await compute.run(fail)
    assert await compute.run(lambda: 7) == 7


async def test_nothing_of_a_finished_step_stays_referenced(compute: Compute) -> None:
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


async def test_closing_fails_what_waits_and_refuses_what_comes() -> None:
    compute = Compute()
    gate = Gate()
    blocking = asyncio.create_task(compute.run(gate.step))
    await gate.running()
    waiting = asyncio.create_task(compute.run(lambda: None))
    await asyncio.sleep(0)
    closing = asyncio.create_task(asyncio.to_thread(compute.close))
    with pytest.raises(WorkerUnavailable):
        await waiting
    gate.open()
    await asyncio.gather(blocking, closing)
    with pytest.raises(WorkerUnavailable, match="stopped"):
        await compute.run(lambda: None)
