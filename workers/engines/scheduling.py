"""`Admission`: who may run now, who waits, who is sent away.

    arrive ──► running (at most max_running) ──► leave
       └─────► waiting (at most max_waiting, highest priority first) ──► running
       └─────► Overloaded

`Compute`: the one thread on which a worker's model runs, a bounded step at a time.

Work that takes long is cut into steps by its caller (a chunk of a prompt, one decode step, a chunk of a mapping), and
each step queues anew. So steps of different requests interleave: highest priority first, first come first served
within one.

`Batcher`: one more token for each of several answers, in one step on the compute thread.

    waiting ──► at most `max_rows`, the highest priority first ──► one step ──► each is told its token ──► waiting

Whoever comes during a step joins the next one. For use on one event loop.

Which threads of a worker share their work out among the cores."""

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
                await wait_until_done(waiting)
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


async def wait_until_done(waiting: asyncio.Future[Any]) -> None:
    """Wait until a step that runs has ended, however often the waiter is cancelled meanwhile."""
    while not waiting.done():
        try:
            await asyncio.wait([waiting])
        except asyncio.CancelledError:
            continue
    if not waiting.cancelled():
        waiting.exception()  # retrieved, so that asyncio does not report it as lost


log = logging.getLogger(__name__)

Row = TypeVar("Row")
Told = TypeVar("Told")


class _Waiter(Generic[Row, Told]):
    def __init__(self, row: Row, priority: int):
        self.row = row
        self.priority = priority
        self.told: asyncio.Future[Told] = asyncio.get_running_loop().create_future()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def tell(self, outcome: Told | Exception) -> None:
        if self.told.done():
            return  # whoever waited has left
        if isinstance(outcome, Exception):
            self.told.set_exception(outcome)
        else:
            self.told.set_result(outcome)


class Batcher(Generic[Row, Told]):
    """`run(rows, priority)` has the compute thread take the step, and gives for each row what it is told, or what went
    wrong with it alone. A step that fails as a whole, and so has left no trace, is taken once more by each row for
    itself: one that is at fault spoils no other's answer."""

    def __init__(self, run: Callable[[Sequence[Row], int], Awaitable[Sequence[Told | Exception]]], max_rows: int):
        self._run = run
        self._max_rows = max_rows
        self._waiting: list[_Waiter[Row, Told]] = []
        self._turning: asyncio.Task[None] | None = None

    async def join(self, row: Row, *, priority: int = 0) -> Told:
        """What the step of the next round tells of `row`. Cancelled, it leaves before the step or waits it out."""
        place = _Waiter[Row, Told](row, priority)
        self._waiting.append(place)
        if self._turning is None or self._turning.done():
            self._turning = asyncio.create_task(self._turn())
        try:
            return await place.told
        except asyncio.CancelledError:
            if place in self._waiting:
                self._waiting.remove(place)
            else:
                await wait_until_done(place.ended)
            raise

    async def _turn(self) -> None:
        while self._waiting:
            await self._take(self._choose())
            await asyncio.sleep(0)  # whoever was told a token comes again before the next round begins

    def _choose(self) -> list[_Waiter[Row, Told]]:
        chosen = sorted(self._waiting, key=lambda place: -place.priority)[: self._max_rows]
        self._waiting = [place for place in self._waiting if place not in chosen]
        return chosen

    async def _take(self, places: Sequence[_Waiter[Row, Told]]) -> None:
        try:
            for place, outcome in zip(places, await self._outcomes(places), strict=True):
                place.tell(outcome)
        finally:
            for place in places:
                place.ended.set_result(None)

    async def _outcomes(self, places: Sequence[_Waiter[Row, Told]]) -> Sequence[Told | Exception]:
        try:
            return await self._run([place.row for place in places], max(place.priority for place in places))
        except Exception as error:
            if len(places) == 1:
                return [error]
            fields = exception_fields(error)
            log.warning("a round of %d answers failed, and is taken one by one: %s", len(places), fields)
            return [await self._alone(place, error) for place in places]

    async def _alone(self, place: _Waiter[Row, Told], error: Exception) -> Told | Exception:
        """Nothing is done for who has left meanwhile."""
        return error if place.told.done() else (await self._outcomes([place]))[0]


def set_compute_threads(num_threads: int) -> None:
    """This thread's work goes to `num_threads`, that of threads which have not yet used torch stays theirs alone.

    A second thread that shared its work out would have helpers of its own, and once there are more of them than cores,
    libgomp has all sleep between two products instead of spinning: a prompt takes a fifth longer.
    """
    torch.set_num_threads(num_threads)  # for all threads that have not yet looked
    torch.get_num_threads()
    following = threading.Thread(target=torch.set_num_threads, args=(1,))
    following.start()
    following.join()
