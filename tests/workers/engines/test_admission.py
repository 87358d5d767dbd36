"""Admission: limits, priorities, deadlines and cancellation."""

from __future__ import annotations

import asyncio
import gc
import time

import pytest

from workers.api.errors import DeadlineExceeded, Overloaded
from workers.engines.scheduling import Admission


class Request:
    """Holds a slot until `end`."""

    def __init__(self, admission: Admission, *, priority: int = 0):
        self.entered = asyncio.Event()
        self.ending = asyncio.Event()
        self.task = asyncio.create_task(self._run(admission, priority))

    async def _run(self, admission: Admission, priority: int) -> None:
        async with admission.admit(priority=priority):
            self.entered.set()
            await self.ending.wait()

    async def end(self) -> None:
        self.ending.set()
        await self.task


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_full_queue_raises_overloaded_with_retry_after() -> None:
    admission = Admission(max_running=1, max_waiting=1)
    first = Request(admission)
    await settle()
    second = Request(admission)
    await settle()
    assert (admission.num_running, admission.num_waiting) == (1, 1)
    with pytest.raises(Overloaded) as raised:
        async with admission.admit():
            pass
    assert raised.value.retry_after_s
    await first.end()
    await second.end()
    assert (admission.num_running, admission.num_waiting) == (0, 0)


async def test_highest_priority_is_admitted_first() -> None:
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


async def test_wait_ends_at_deadline() -> None:
    admission = Admission(max_running=1, max_waiting=8)
    first = Request(admission)
    await settle()
    with pytest.raises(DeadlineExceeded):
        async with admission.admit(deadline=time.monotonic() + 0.01):
            pass
    await first.end()
    assert (admission.num_running, admission.num_waiting) == (0, 0)


async def test_cancelled_wait_leaves_queue() -> None:
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


async def test_expired_waits_are_removed_from_queue() -> None:
    admission = Admission(max_running=1, max_waiting=1)
    first = Request(admission)
    await settle()
    num_before = num_cancelled_futures()
    for _ in range(50):
        with pytest.raises(DeadlineExceeded):
            async with admission.admit(deadline=time.monotonic()):
                pass
    assert num_cancelled_futures() < num_before + 10
    await first.end()


def num_cancelled_futures() -> int:
    """Count the cancelled futures that are still referenced."""
    gc.collect()
    return sum(type(thing) is asyncio.Future and thing.cancelled() for thing in gc.get_objects())


async def test_slot_granted_to_cancelled_request_is_passed_on() -> None:
    admission = Admission(max_running=1, max_waiting=8)
    first = Request(admission)
    await settle()
    second, third = Request(admission), Request(admission)
    await settle()
    first.ending.set()
    await first.task  # the slot is granted to second, which has not run yet
    second.task.cancel()
    await settle()
    assert third.entered.is_set()
    await third.end()
    assert admission.num_running == 0
