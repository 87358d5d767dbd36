"""Bounded concurrency: so many at once, so many waiting, nobody longer than its deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gateway.deadline import Deadline
from gateway.errors import RateLimited
from workers.api.errors import DeadlineExceeded, Overloaded


class Gate:
    """Lets `max_running` in, queues `max_waiting`, and tells the rest to come again later."""

    def __init__(
        self,
        name: str,
        *,
        max_running: int,
        max_waiting: int,
        on_running: Callable[[int], None] = lambda num_running: None,
        on_waiting: Callable[[int], None] = lambda num_waiting: None,
    ):
        self._name = name
        self._slots = asyncio.Semaphore(max_running)
        self._max_waiting = max_waiting
        self._on_running = on_running
        self._on_waiting = on_waiting
        self._running = 0
        self._waiting = 0

    async def enter(self, deadline: Deadline) -> None:
        """Who has entered leaves. Raises `Overloaded` where the queue is full, or no place came free in time."""
        if self._slots.locked():
            await self._wait(deadline)
        else:
            await self._slots.acquire()
        self._running += 1
        self._on_running(self._running)

    def leave(self) -> None:
        self._slots.release()
        self._running -= 1
        self._on_running(self._running)

    @contextmanager
    def queued(self) -> Iterator[None]:
        """One of those that wait, for whatever it is. Raises `Overloaded` where they are too many."""
        if self._waiting >= self._max_waiting:
            raise Overloaded(f"the {self._name} tier's queue of {self._max_waiting} is full", retry_after_s=1.0)
        self._count_waiting(1)
        try:
            yield
        finally:
            self._count_waiting(-1)

    async def _wait(self, deadline: Deadline) -> None:
        with self.queued():
            try:
                await deadline.bound("waiting for a place", self._slots.acquire())
            except DeadlineExceeded as error:
                raise Overloaded(f"no place in the {self._name} tier came free in time", retry_after_s=2.0) from error

    def _count_waiting(self, change: int) -> None:
        self._waiting += change
        self._on_waiting(self._waiting)


class Shares:
    """How many requests each tenant has in flight; over its share, a tenant is told 429."""

    def __init__(self, max_each: int):
        self._max_each = max_each
        self._in_flight: dict[str, int] = {}

    @contextmanager
    def one(self, tenant: str) -> Iterator[None]:
        running = self._in_flight.get(tenant, 0)
        if running >= self._max_each:
            raise RateLimited(f"{running} requests in flight; at most {self._max_each} are allowed", retry_after_s=1.0)
        self._in_flight[tenant] = running + 1
        try:
            yield
        finally:
            self._in_flight[tenant] -= 1
