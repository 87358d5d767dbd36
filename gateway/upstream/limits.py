"""Bounded concurrency: max calls in flight, max calls waiting, and no wait beyond the deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from gateway.errors import RateLimited
from gateway.upstream.deadline import Deadline
from workers.api.errors import DeadlineExceeded, Overloaded


class Gate:
    """Admits `max_running` calls, queues `max_waiting`, and rejects the rest."""

    def __init__(self, name: str, *, max_running: int, max_waiting: int):
        self.num_running = 0
        self.num_waiting = 0
        self._name = name
        self._slots = asyncio.Semaphore(max_running)
        self._max_waiting = max_waiting

    async def enter(self, deadline: Deadline) -> None:
        """Pair with `leave`. Raises `Overloaded` if the queue is full, or no slot came free in time."""
        if self._slots.locked():
            with self.queued():
                try:
                    async with deadline.bound("waiting for a slot"):
                        await self._slots.acquire()
                except DeadlineExceeded as error:
                    raise Overloaded(f"no slot in tier {self._name} came free in time", retry_after_s=2.0) from error
        else:
            await self._slots.acquire()
        self.num_running += 1

    def leave(self) -> None:
        self._slots.release()
        self.num_running -= 1

    @contextmanager
    def queued(self) -> Iterator[None]:
        """Count as waiting, for whatever reason. Raises `Overloaded` if too many wait."""
        if self.num_waiting >= self._max_waiting:
            raise Overloaded(f"tier {self._name}'s queue of {self._max_waiting} is full", retry_after_s=1.0)
        self.num_waiting += 1
        try:
            yield
        finally:
            self.num_waiting -= 1


class TenantShares:
    """Requests in flight by tenant, each tenant up to its share."""

    def __init__(self, max_each: int):
        self._max_each = max_each
        self._in_flight: dict[str, int] = {}

    @contextmanager
    def one(self, tenant: str) -> Iterator[None]:
        """Count one request. Raises `RateLimited` if the tenant is at its share."""
        running = self._in_flight.get(tenant, 0)
        if running >= self._max_each:
            raise RateLimited(f"{running} requests in flight; at most {self._max_each} are allowed", retry_after_s=1.0)
        self._in_flight[tenant] = running + 1
        try:
            yield
        finally:
            self._in_flight[tenant] -= 1
