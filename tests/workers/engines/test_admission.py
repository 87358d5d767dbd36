"""Who runs, who waits, who is sent away."""

from __future__ import annotations

import asyncio
import gc
import time

import pytest

from workers.api.errors import DeadlineExceeded, Overloaded
from workers.engines.scheduling import Admission


class Request:
    """Holds a place until it is told to leave."""

    def __init__(self, admission: Admission, *, priority: int = 0):
        self.entered = asyncio.Event()
        self.leave = asyncio.Event()
        self.task = asyncio.create_task(self._run(admission, priority))

    async def _run(self, admission: Admission, priority: int) -> None:
        async with admission.admit(priority=priority):
            self.entered.set()
            await self.leave.wait()

    async def end(self) -> None:
        self.leave.set()
        await self.task


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_the_queue_is_bounded_and_says_when_to_come_again() -> None:
    admission = Admission(max_running=1, max_waiting=1)
    first = Request(admission)
    await settle()
    second = Request(admission)
    await settle()
    assert (admission.num_running, admission.num_waiting) == (1, 1)
    with pytest.raises(Overloaded) as refused:
        async with admission.admit():
            pass
    assert refused.value.retry_after_s
    await first.end()
    await second.end()
    assert (admission.num_running, admission.num_waiting) == (0, 0)


async def test_the_most_urgent_waits_least() -> None:
    admission = Admission(max_running=1, max_waiting=8)
    first = Request(admission)
    await settle()
    slow, urgent = Request(admission), Request(admission, priority=3)
    await settle()
    await first.end()
    await settle()
    assert urgent.entered.is_set() and not slow.entered.is_set()
    await urgent.end()
    await settle()
    assert slow.entered.is_set()
    await slow.end()


async def test_waiting_ends_with_the_deadline() -> None:
    admission = Admission(max_running=1, max_waiting=8)
    first = Request(admission)
    await settle()
    with pytest.raises(DeadlineExceeded):
        async with admission.admit(deadline=time.monotonic() + 0.01):
            pass
    await first.end()
    assert (admission.num_running, admission.num_waiting) == (0, 0)


async def test_who_gives_up_waiting_leaves_no_trace() -> None:
    admission = Admission(max_running=1, max_waiting=1)
    first = Request(admission)
    await settle()
    second = Request(admission)
    await settle()
    second.task.cancel()
    await settle()
    assert admission.num_waiting == 0
    await first.end()
    assert admission.num_running == 0


async def test_however_many_give_up_the_queue_does_not_grow() -> None:
    admission = Admission(max_running=1, max_waiting=1)
    first = Request(admission)
    await settle()
    left_before = given_up()
    for _ in range(50):
        with pytest.raises(DeadlineExceeded):
            async with admission.admit(deadline=time.monotonic()):
                pass
    assert given_up() < left_before + 10
    await first.end()


def given_up() -> int:
    """Futures that were cancelled and are still held by somebody."""
    gc.collect()
    return sum(type(thing) is asyncio.Future and thing.cancelled() for thing in gc.get_objects())


async def test_a_place_given_to_one_who_leaves_is_passed_on() -> None:
    admission = Admission(max_running=1, max_waiting=8)
    first = Request(admission)
    await settle()
    second, third = Request(admission), Request(admission)
    await settle()
    first.leave.set()
    await first.task  # the place is second's now, which has not run yet
    second.task.cancel()
    await settle()
    assert third.entered.is_set()
    await third.end()
    assert admission.num_running == 0
