"""`Compute`: the one thread on which a worker's model runs, a bounded step at a time.

Work that takes long is cut into steps by its caller (a chunk of a prompt, one decode step, a chunk of a mapping), and
each step queues anew. So steps of different requests interleave: highest priority first, first come first served
within one.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from workers.api.errors import WorkerUnavailable

R = TypeVar("R")

BACKGROUND = -100  # the priority of work that nobody waits for

_Step = tuple[int, int, "Future[Any]", Callable[[], Any]]


class Compute:
    """A thread with a priority queue. `on_start` runs first, on that thread (to set its number of threads)."""

    def __init__(self, *, on_start: Callable[[], None] | None = None, name: str = "compute"):
        self._steps: list[_Step] = []
        self._arrival = itertools.count()
        self._changed = threading.Condition()
        self._closed = False
        self.busy_at = time.monotonic()  # when work that somebody waits for was last queued, or ended
        self._thread = threading.Thread(target=self._run, args=(on_start,), name=name, daemon=True)
        self._thread.start()

    async def run(self, step: Callable[[], R], *, priority: int = 0) -> R:
        """Run `step` on the compute thread and return what it returns.

        When the caller is cancelled, a step that has not begun is dropped; one that runs is waited for first, so that
        the memory it writes to may be freed as soon as this call has raised.
        """
        done = self.submit(step, priority=priority)
        waiting = asyncio.wrap_future(done)
        try:
            return await asyncio.shield(waiting)
        except asyncio.CancelledError:
            if not done.cancel():
                await settled(waiting)
            raise

    def submit(self, step: Callable[[], R], *, priority: int = 0) -> Future[R]:
        """Queue `step`, from any thread."""
        done: Future[R] = Future()
        with self._changed:
            if self._closed:
                raise WorkerUnavailable("the engine has stopped")
            heapq.heappush(self._steps, (-priority, next(self._arrival), done, step))
            self._note_busy(-priority)
            self._changed.notify()
        return done

    def close(self) -> None:
        """Finish the running step, fail those that wait, and end the thread."""
        with self._changed:
            self._closed = True
            dropped, self._steps = self._steps, []
            self._changed.notify()
        for _, _, done, _ in dropped:
            if done.set_running_or_notify_cancel():
                done.set_exception(WorkerUnavailable("the engine has stopped"))
        self._thread.join()

    def _run(self, on_start: Callable[[], None] | None) -> None:
        if on_start is not None:
            on_start()
        while self._run_next():
            pass

    def _run_next(self) -> bool:
        # A frame of its own: while the thread waits for the next step, nothing of the last one stays referenced.
        with self._changed:
            self._changed.wait_for(lambda: self._steps or self._closed)
            if self._closed:
                return False
            order, _, done, step = heapq.heappop(self._steps)
        if done.set_running_or_notify_cancel():
            try:
                done.set_result(step())
            except BaseException as error:
                done.set_exception(error)
        self._note_busy(order)
        return True

    def _note_busy(self, order: int) -> None:
        if order < -BACKGROUND:
            self.busy_at = time.monotonic()


async def settled(waiting: asyncio.Future[Any]) -> None:
    """Wait until a step that runs has ended, however often the waiter is cancelled meanwhile."""
    while not waiting.done():
        try:
            await asyncio.wait([waiting])
        except asyncio.CancelledError:
            continue
    if not waiting.cancelled():
        waiting.exception()  # retrieved, so that asyncio does not report it as lost
