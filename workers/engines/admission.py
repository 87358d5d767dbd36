"""`Admission`: who may run now, who waits, who is sent away.

    arrive ──► running (at most max_running) ──► leave
       └─────► waiting (at most max_waiting, highest priority first) ──► running
       └─────► Overloaded
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from workers.api.errors import DeadlineExceeded, Overloaded

RETRY_AFTER_S = 1.0


@dataclass(frozen=True)
class Claim:
    """A place among the running requests. `deadline` is an instant of `time.monotonic()`, None for no deadline."""

    priority: int = 0
    deadline: float | None = None
    waited_s: float = 0.0

    def check(self) -> None:
        """Raise `DeadlineExceeded` once the deadline has passed. Called before every step."""
        if self.deadline is not None and time.monotonic() >= self.deadline:
            raise DeadlineExceeded("the request's deadline passed before its work was done")


class Admission:
    """Bounded places for requests. For use on one event loop."""

    def __init__(self, *, max_running: int, max_waiting: int):
        self.max_running = max_running
        self.max_waiting = max_waiting
        self.num_running = 0
        self._arrival = itertools.count()
        self._queue: list[tuple[int, int, asyncio.Future[None]]] = []

    @property
    def num_waiting(self) -> int:
        return sum(not place.done() for _, _, place in self._queue)

    @asynccontextmanager
    async def admit(self, *, priority: int = 0, deadline: float | None = None) -> AsyncIterator[Claim]:
        """Hold a place for the length of the block. Raises `Overloaded` at once, `DeadlineExceeded` while waiting."""
        arrived = time.monotonic()
        await self._enter(priority, deadline)
        try:
            yield Claim(priority, deadline, time.monotonic() - arrived)
        finally:
            self._leave()

    async def _enter(self, priority: int, deadline: float | None) -> None:
        if self.num_running < self.max_running:
            self.num_running += 1
            return
        if self.num_waiting >= self.max_waiting:
            raise Overloaded(
                f"{self.num_waiting} requests wait already, at most {self.max_waiting} may", retry_after_s=RETRY_AFTER_S
            )
        await self._wait_for_place(priority, deadline)

    async def _wait_for_place(self, priority: int, deadline: float | None) -> None:
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._queue, (-priority, next(self._arrival), place))
        try:
            async with asyncio.timeout(None if deadline is None else max(0.0, deadline - time.monotonic())):
                await place
        except TimeoutError as error:
            self._give_up(place)
            raise DeadlineExceeded("the request's deadline passed while it waited for a place") from error
        except asyncio.CancelledError:
            self._give_up(place)
            raise

    def _give_up(self, place: asyncio.Future[None]) -> None:
        if place.done() and not place.cancelled():
            self._leave()  # the place was given in the very moment the wait ended: pass it on
        else:
            place.cancel()
            self._queue = [entry for entry in self._queue if entry[2] is not place]
            heapq.heapify(self._queue)

    def _leave(self) -> None:
        """Pass the place on to the first that still waits, or give it up."""
        while self._queue:
            _, _, place = heapq.heappop(self._queue)
            if not place.done():
                place.set_result(None)
                return
        self.num_running -= 1
