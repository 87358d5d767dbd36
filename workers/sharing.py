"""`SharedWork`: equal pieces of work that run at once are done once.

    caller 1 ──► starts the work ────────────────► result
    caller 2 ─────► joins ───────────────────────► the same result
    caller 3 ─────► joins ──► hangs up, or is late   leaves alone; the work goes on for the others

The work stops when its last caller leaves, and that caller leaves only when the work has cleaned up.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

from workers.api.errors import DeadlineExceeded, Overloaded, WorkerUnavailable
from workers.api.tasks import cancel_and_wait

R = TypeVar("R")


class Job(Generic[R]):
    """One piece of work under way. Its deadline, of `time.monotonic()`, is that of its most patient caller."""

    def __init__(self, deadline: float):
        self.deadline = deadline
        self.num_callers = 0
        self.task: asyncio.Task[R] | None = None

    @property
    def remaining_s(self) -> float:
        return self.deadline - time.monotonic()

    def check(self) -> None:
        """Raise `DeadlineExceeded` once nobody has time left. To be called between steps."""
        if self.remaining_s <= 0:
            raise DeadlineExceeded("the deadline passed before the work was done")


class SharedWork(Generic[R]):
    """For use on one event loop. `max_jobs` bounds the different pieces of work at once."""

    def __init__(self, *, max_jobs: int):
        self._max_jobs = max_jobs
        self._jobs: dict[Hashable, Job[R]] = {}

    async def run(self, key: Hashable, deadline: float, work: Callable[[Job[R]], Awaitable[R]]) -> R:
        """The result of the work of that key, started now or under way already. `DeadlineExceeded` at `deadline`,
        `Overloaded` when too much else is under way, `WorkerUnavailable` on `aclose`; what the work raises, all its
        callers get."""
        job = self._jobs.get(key) or self._start(key, deadline, work)
        assert job.task is not None, "a job is listed once it has started"
        job.deadline = max(job.deadline, deadline)
        job.num_callers += 1
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                return await asyncio.shield(job.task)
        except TimeoutError as error:
            raise DeadlineExceeded("the deadline passed before the work was done") from error
        except asyncio.CancelledError as error:
            if job.task.cancelled() and not _being_cancelled():
                raise WorkerUnavailable("the worker is stopping") from error
            raise
        finally:
            job.num_callers -= 1
            if not job.num_callers:
                await self._stop(key, job)

    async def aclose(self) -> None:
        """Stop everything and wait until it has cleaned up."""
        for key, job in list(self._jobs.items()):
            await self._stop(key, job)

    def _start(self, key: Hashable, deadline: float, work: Callable[[Job[R]], Awaitable[R]]) -> Job[R]:
        if len(self._jobs) >= self._max_jobs:
            raise Overloaded(f"{len(self._jobs)} pieces of work are under way, which is the most", retry_after_s=0.5)
        job: Job[R] = Job(deadline)
        self._jobs[key] = job
        job.task = asyncio.create_task(self._finish(key, job, work))
        return job

    async def _finish(self, key: Hashable, job: Job[R], work: Callable[[Job[R]], Awaitable[R]]) -> R:
        try:
            return await work(job)
        finally:
            self._unlist(key, job)

    async def _stop(self, key: Hashable, job: Job[R]) -> None:
        """End a job that nobody waits for. No newcomer may join it: it is unlisted first."""
        self._unlist(key, job)
        if job.task is not None:
            await cancel_and_wait(job.task)

    def _unlist(self, key: Hashable, job: Job[R]) -> None:
        if self._jobs.get(key) is job:
            del self._jobs[key]


def _being_cancelled() -> bool:
    """Whether it is the running task itself that is to stop."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
