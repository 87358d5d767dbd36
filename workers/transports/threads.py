"""`PeerThreads`: what waits for a peer's memory or network does so on threads of that peer's own. One that does not
answer holds up what is wanted of it, and nothing else."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from workers.api.errors import WorkerUnavailable

R = TypeVar("R")

THREADS_EACH = 4


class PeerThreads:
    """A few threads for each key, made when they are needed. Safe from any thread."""

    def __init__(self, threads_each: int = THREADS_EACH):
        self._threads_each = threads_each
        self._lock = threading.Lock()
        self._closed = False
        self._pools: dict[Hashable, ThreadPoolExecutor] = {}
        self._num_waiting: Counter[Hashable] = Counter()

    def submit(self, key: Hashable, work: Callable[[], R]) -> Future[R]:
        """Cancelled before it has begun, it never runs. `WorkerUnavailable` once this is closed."""
        with self._lock:
            if self._closed:
                raise WorkerUnavailable("this worker reads no more pools: it is stopping")
            if key not in self._pools:
                self._pools[key] = ThreadPoolExecutor(self._threads_each, thread_name_prefix="peer")
            self._num_waiting[key] += 1
            done = self._pools[key].submit(work)
        done.add_done_callback(lambda _: self._note_done(key))
        return done

    def sweep(self) -> None:
        """End the threads of the keys that nobody waits for."""
        with self._lock:
            idle = [self._pools.pop(key) for key in list(self._pools) if not self._num_waiting[key]]
        for pool in idle:
            pool.shutdown(wait=False)

    def close(self) -> None:
        """What has not begun never runs; what runs is not waited for."""
        with self._lock:
            self._closed = True
            pools, self._pools = list(self._pools.values()), {}
        for pool in pools:
            pool.shutdown(wait=False, cancel_futures=True)

    def _note_done(self, key: Hashable) -> None:
        with self._lock:
            self._num_waiting[key] -= 1
            if not self._num_waiting[key]:
                del self._num_waiting[key]
