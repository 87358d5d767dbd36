"""`SharedWork`: equal jobs that run at the same time are done once.

    caller 1 ──► starts the work ────────────────► result
    caller 2 ─────► joins ───────────────────────► the same result
    caller 3 ─────► joins ──► is cancelled or late   leaves alone; the work continues for the others

The work stops when its last caller leaves. That caller waits until the work has cleaned up.
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
    """A running job. Its deadline, an instant of `time.monotonic()`, is the latest of its callers'."""

    def __init__(self, deadline: float):
        self.deadline = deadline
        self.num_callers = 0
        self.task: asyncio.Task[R] | None = None

    @property
    def remaining_s(self) -> float:
        return self.deadline - time.monotonic()

    def check(self) -> None:
        """Raise `DeadlineExceeded` if the deadline has passed. Called between steps."""
        if self.remaining_s <= 0:
            raise DeadlineExceeded("the deadline passed before the work was done")


class SharedWork(Generic[R]):
    """For use on one event loop. `max_jobs` bounds the number of different jobs at the same time."""

    def __init__(self, *, max_jobs: int):
        self._max_jobs = max_jobs
        self._jobs: dict[Hashable, Job[R]] = {}

    async def run(self, key: Hashable, deadline: float, work: Callable[[Job[R]], Awaitable[R]]) -> R:
        """Return the result of the job with that key, started now or already running.

        Raises `DeadlineExceeded` at `deadline`, `Overloaded` above `max_jobs`, `WorkerUnavailable` on `aclose`. An
        error of the work reaches all its callers.
        """
        job = self._jobs.get(key) or self._start(key, deadline, work)
        assert job.task is not None, "a listed job has started"
        job.deadline = max(job.deadline, deadline)
        job.num_callers += 1
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                return await asyncio.shield(job.task)
        except TimeoutError as error:
            raise DeadlineExceeded("the deadline passed before the work was done") from error
        except asyncio.CancelledError as error:
            if job.task.cancelled() and not _is_being_cancelled():
                raise WorkerUnavailable("the worker is stopping") from error
            raise
        finally:
            job.num_callers -= 1
            if not job.num_callers:
                await self._stop(key, job)

    async def aclose(self) -> None:
        """Stop all jobs and wait until they have cleaned up."""
        for key, job in list(self._jobs.items()):
            await self._stop(key, job)

    def _start(self, key: Hashable, deadline: float, work: Callable[[Job[R]], Awaitable[R]]) -> Job[R]:
        if len(self._jobs) >= self._max_jobs:
            raise Overloaded(f"{len(self._jobs)} jobs are running, which is the limit", retry_after_s=0.5)
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
        """Stop a job. It is unlisted first, so that no new caller joins it."""
        self._unlist(key, job)
        if job.task is not None:
            await cancel_and_wait(job.task)

    def _unlist(self, key: Hashable, job: Job[R]) -> None:
        if self._jobs.get(key) is job:
            del self._jobs[key]


def _is_being_cancelled() -> bool:
    """Return whether the running task itself is cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
