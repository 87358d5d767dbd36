"""Bounded concurrency: so many at once, so many waiting, nobody longer than its deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from gateway.errors import RateLimited
from gateway.upstream.deadline import Deadline
from workers.api.errors import DeadlineExceeded, Overloaded


class Gate:
    """Lets `max_running` in, queues `max_waiting`, and tells the rest to come again later."""

    def __init__(self, name: str, *, max_running: int, max_waiting: int):
        self.num_running = 0
        self.num_waiting = 0
        self._name = name
        self._slots = asyncio.Semaphore(max_running)
        self._max_waiting = max_waiting

    async def enter(self, deadline: Deadline) -> None:
        """Who has entered leaves. Raises `Overloaded` where the queue is full, or no place came free in time."""
        if self._slots.locked():
            await self._wait(deadline)
        else:
            await self._slots.acquire()
        self.num_running += 1

    def leave(self) -> None:
        self._slots.release()
        self.num_running -= 1

    @contextmanager
    def queued(self) -> Iterator[None]:
        """One of those that wait, for whatever it is. Raises `Overloaded` where they are too many."""
        if self.num_waiting >= self._max_waiting:
            raise Overloaded(f"the {self._name} tier's queue of {self._max_waiting} is full", retry_after_s=1.0)
        self.num_waiting += 1
        try:
            yield
        finally:
            self.num_waiting -= 1

    async def _wait(self, deadline: Deadline) -> None:
        with self.queued():
            try:
                await deadline.bound("waiting for a place", self._slots.acquire())
            except DeadlineExceeded as error:
                raise Overloaded(f"no place in the {self._name} tier came free in time", retry_after_s=2.0) from error


class Shares:
    """How many requests each tenant has in flight; over its share, a tenant is told 429."""

    def __init__(self, max_each: int):
        self._max_each = max_each
        self._in_flight: dict[str, int] = {}

    def one(self, tenant: str) -> InFlight:
        """The block of one request more. Raises `RateLimited`, at once."""
        running = self._in_flight.get(tenant, 0)
        if running >= self._max_each:
            raise RateLimited(f"{running} requests in flight; at most {self._max_each} are allowed", retry_after_s=1.0)
        return InFlight(self._in_flight, tenant)


class InFlight:
    def __init__(self, counts: dict[str, int], tenant: str):
        self._counts = counts
        self._tenant = tenant

    def __enter__(self) -> None:
        self._counts[self._tenant] = self._counts.get(self._tenant, 0) + 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._counts[self._tenant] -= 1
