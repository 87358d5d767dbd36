"""How requests share one model. `Admission` bounds how many run, `Compute` runs steps, `Batcher` joins decode steps.

    request ──► Admission ──► running (at most max_running) ──► a step at a time on the Compute thread
                   ├────────► waiting (at most max_waiting, highest priority first)
                   └────────► Overloaded

Long work is cut into bounded steps by its caller: a chunk of a prompt, one decode step, a chunk of a mapping. Each step
is queued on its own, so steps of different requests interleave: highest priority first, FIFO within a priority.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from workers.api.errors import DeadlineExceeded, Overloaded, WorkerUnavailable
from workers.api.logs import exception_fields

log = logging.getLogger(__name__)

R = TypeVar("R")
Row = TypeVar("Row")
Result = TypeVar("Result")

RETRY_AFTER_S = 1.0
BACKGROUND = -100  # priority of work that no caller waits for

_Step = tuple[int, int, "Future[Any]", Callable[[], Any]]


@dataclass(frozen=True)
class Claim:
    """One of the slots for running requests. `deadline` is an instant of `time.monotonic()`, or None."""

    priority: int = 0
    deadline: float | None = None
    waited_s: float = 0.0

    def check(self) -> None:
        """Raise `DeadlineExceeded` if the deadline has passed. Called before every step."""
        if self.deadline is not None and time.monotonic() >= self.deadline:
            raise DeadlineExceeded("the deadline passed before the request was finished")


class Admission:
    """Bounded slots for requests. For use on one event loop."""

    def __init__(self, *, max_running: int, max_waiting: int):
        self.max_running = max_running
        self.max_waiting = max_waiting
        self.num_running = 0
        self._arrival = itertools.count()
        self._queue: list[tuple[int, int, asyncio.Future[None]]] = []

    @property
    def num_waiting(self) -> int:
        return sum(not slot.done() for _, _, slot in self._queue)

    @asynccontextmanager
    async def admit(self, *, priority: int = 0, deadline: float | None = None) -> AsyncIterator[Claim]:
        """Hold a slot inside the block. Raises `Overloaded` at once, or `DeadlineExceeded` while waiting."""
        arrived = time.monotonic()
        if self.num_running < self.max_running:
            self.num_running += 1
        elif self.num_waiting >= self.max_waiting:
            raise Overloaded(
                f"{self.num_waiting} requests are waiting; the limit is {self.max_waiting}", retry_after_s=RETRY_AFTER_S
            )
        else:
            await self._wait_for_slot(priority, deadline)
        try:
            yield Claim(priority, deadline, time.monotonic() - arrived)
        finally:
            self._release_slot()

    async def _wait_for_slot(self, priority: int, deadline: float | None) -> None:
        slot: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._queue, (-priority, next(self._arrival), slot))
        try:
            async with asyncio.timeout(None if deadline is None else max(0.0, deadline - time.monotonic())):
                await slot
        except (TimeoutError, asyncio.CancelledError) as error:
            if slot.done() and not slot.cancelled():
                self._release_slot()  # granted at the very moment the wait ended: pass it on
            else:
                slot.cancel()
                self._queue = [entry for entry in self._queue if entry[2] is not slot]
                heapq.heapify(self._queue)
            if isinstance(error, asyncio.CancelledError):
                raise
            raise DeadlineExceeded("the deadline passed while the request waited for a slot") from error

    def _release_slot(self) -> None:
        """Grant the slot to the first request still waiting, or free it."""
        while self._queue:
            _, _, slot = heapq.heappop(self._queue)
            if not slot.done():
                slot.set_result(None)
                return
        self.num_running -= 1


class Compute:
    """The one thread that runs a model, with a priority queue of steps. `on_start` runs first on that thread."""

    def __init__(self, *, on_start: Callable[[], None] | None = None, name: str = "compute"):
        self._steps: list[_Step] = []
        self._arrival = itertools.count()
        self._changed = threading.Condition()
        self._closed = False
        self.busy_at = time.monotonic()  # when a foreground step was last queued or finished
        self._thread = threading.Thread(target=self._run, args=(on_start,), name=name, daemon=True)
        self._thread.start()

    async def run(self, step: Callable[[], R], *, priority: int = 0) -> R:
        """Run `step` on the compute thread and return its result.

        If the caller is cancelled, a queued step is dropped and a running one is awaited first. So the memory that the
        step writes to may be freed as soon as this call has raised.
        """
        done = self.submit(step, priority=priority)
        waiting = asyncio.wrap_future(done)
        try:
            return await asyncio.shield(waiting)
        except asyncio.CancelledError:
            if not done.cancel():
                await wait_until_done(waiting)
            raise

    def submit(self, step: Callable[[], R], *, priority: int = 0) -> Future[R]:
        """Queue `step`. Safe from any thread. Raises `WorkerUnavailable` after `close`."""
        done: Future[R] = Future()
        with self._changed:
            if self._closed:
                raise WorkerUnavailable("the engine has stopped")
            heapq.heappush(self._steps, (-priority, next(self._arrival), done, step))
            self._note_busy(-priority)
            self._changed.notify()
        return done

    def close(self) -> None:
        """Finish the running step, fail the queued ones and end the thread."""
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
        # In its own frame, so that nothing of the last step stays referenced while the thread waits for the next.
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


async def wait_until_done(waiting: asyncio.Future[Any]) -> None:
    """Wait until a running step has ended, however often the caller is cancelled meanwhile."""
    while not waiting.done():
        try:
            await asyncio.wait([waiting])
        except asyncio.CancelledError:
            continue
    if not waiting.cancelled():
        waiting.exception()  # retrieved, so that asyncio does not report it as lost


def set_compute_threads(num_threads: int) -> None:
    """Let torch use `num_threads` for this thread's work, and one for every thread that has not used torch yet.

    A second thread with helpers of its own would give libgomp more threads than cores. It then makes all of them sleep
    between two products instead of spinning, and prefill takes a fifth longer.
    """
    torch.set_num_threads(num_threads)  # the default of all threads that have not read it yet
    torch.get_num_threads()
    resetting = threading.Thread(target=torch.set_num_threads, args=(1,))
    resetting.start()
    resetting.join()


class _Waiter(Generic[Row, Result]):
    def __init__(self, row: Row, priority: int):
        self.row = row
        self.priority = priority
        self.result: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class Batcher(Generic[Row, Result]):
    """Runs one step for several requests at once: at most `max_rows` rows, highest priority first.

    A row that arrives during a step joins the next one. `run(rows, priority)` runs the step and returns a result or an
    exception for each row. If the whole step fails, and so has changed nothing, each row is run again alone: a faulty
    request spoils no other. For use on one event loop.
    """

    def __init__(self, run: Callable[[Sequence[Row], int], Awaitable[Sequence[Result | Exception]]], max_rows: int):
        self._run = run
        self._max_rows = max_rows
        self._waiting: list[_Waiter[Row, Result]] = []
        self._loop: asyncio.Task[None] | None = None

    async def join(self, row: Row, *, priority: int = 0) -> Result:
        """Return the row's result of the next step. If cancelled, leave before the step or wait until it has ended."""
        waiter = _Waiter[Row, Result](row, priority)
        self._waiting.append(waiter)
        if self._loop is None or self._loop.done():
            self._loop = asyncio.create_task(self._run_steps())
        try:
            return await waiter.result
        except asyncio.CancelledError:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
            else:
                await wait_until_done(waiter.ended)
            raise

    async def _run_steps(self) -> None:
        while self._waiting:
            batch = sorted(self._waiting, key=lambda waiter: -waiter.priority)[: self._max_rows]
            self._waiting = [waiter for waiter in self._waiting if waiter not in batch]
            try:
                for waiter, result in zip(batch, await self._results(batch), strict=True):
                    if waiter.result.done():
                        continue  # cancelled
                    if isinstance(result, Exception):
                        waiter.result.set_exception(result)
                    else:
                        waiter.result.set_result(result)
            finally:
                for waiter in batch:
                    waiter.ended.set_result(None)
            await asyncio.sleep(0)  # a request that got its token joins again before the next step is chosen

    async def _results(self, batch: Sequence[_Waiter[Row, Result]]) -> Sequence[Result | Exception]:
        try:
            return await self._run([waiter.row for waiter in batch], max(waiter.priority for waiter in batch))
        except Exception as error:
            if len(batch) == 1:
                return [error]
            log.warning("a step of %d rows failed; running each alone: %s", len(batch), exception_fields(error))
            return [error if waiter.result.done() else (await self._results([waiter]))[0] for waiter in batch]
