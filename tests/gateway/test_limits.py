"""Concurrency gates, tenant shares and deadlines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from gateway.errors import RateLimited
from gateway.upstream.deadline import Deadline
from gateway.upstream.limits import Gate, TenantShares
from workers.api.errors import DeadlineExceeded, Overloaded


@asynccontextmanager
async def slot(gate: Gate, within_s: float = 5.0) -> AsyncIterator[None]:
    await gate.enter(Deadline.after(within_s))
    try:
        yield
    finally:
        gate.leave()


async def hold(gate: Gate, release: asyncio.Event, within_s: float = 5.0) -> None:
    async with slot(gate, within_s):
        await release.wait()


async def test_a_full_gate_rejects_with_a_retry_time() -> None:
    gate = Gate("large", max_running=1, max_waiting=1)
    release = asyncio.Event()
    tasks = [asyncio.create_task(hold(gate, release)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="large") as refused:
        await hold(gate, release)
    assert refused.value.retry_after_s is not None
    assert (gate.num_running, gate.num_waiting) == (1, 1)
    release.set()
    await asyncio.gather(*tasks)
    assert (gate.num_running, gate.num_waiting) == (0, 0)


async def test_a_waiter_is_rejected_at_its_deadline() -> None:
    gate = Gate("large", max_running=1, max_waiting=5)
    release = asyncio.Event()
    task = asyncio.create_task(hold(gate, release))
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await hold(gate, release, within_s=0.02)
    release.set()
    await task
    async with slot(gate):
        pass  # the rejected waiter left the queue


async def test_cancellation_frees_the_slot() -> None:
    gate = Gate("large", max_running=1, max_waiting=0)
    task = asyncio.create_task(hold(gate, asyncio.Event()))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task})
    async with slot(gate):
        pass


def test_a_tenant_over_its_share_is_rate_limited() -> None:
    shares = TenantShares(1)
    with shares.one("a"):
        with shares.one("b"):
            pass
        with pytest.raises(RateLimited), shares.one("a"):
            pass
    with shares.one("a"):
        pass


async def test_a_deadline_cancels_the_bounded_call() -> None:
    cancelled = asyncio.Event()

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    with pytest.raises(DeadlineExceeded, match="thinking"):
        async with Deadline.after(0.01).bound("thinking"):
            await forever()
    assert cancelled.is_set()


def test_a_deadline_can_be_divided() -> None:
    now = 10.0
    deadline = Deadline(20.0, lambda: now)
    assert deadline.share(0.25).at == 12.5
    assert deadline.less(4.0).at == 16.0
    assert deadline.earlier(deadline.less(1.0)).at == 19.0
