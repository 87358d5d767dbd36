"""`Readers`: the peers' pools that this worker has open, one per peer and transport. `PeerThreads`: threads that may
wait for a peer."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from workers.api.errors import WorkerUnavailable
from workers.api.schemas import KVLayout, PoolExport
from workers.transports import load_transport
from workers.transports.base import Reader, Transport

R = TypeVar("R")

THREADS_PER_KEY = 4


class PeerThreads:
    """A few threads for each key, started on demand. Safe from any thread.

    Work that waits for a peer's memory or network runs here. A peer that does not answer delays only the work that
    needs it.
    """

    def __init__(self, threads_per_key: int = THREADS_PER_KEY):
        self._threads_per_key = threads_per_key
        self._lock = threading.Lock()
        self._closed = False
        self._pools: dict[Hashable, ThreadPoolExecutor] = {}
        self._num_pending: Counter[Hashable] = Counter()

    def submit(self, key: Hashable, work: Callable[[], R]) -> Future[R]:
        """Queue `work`. If cancelled before it has begun, it never runs. Raises `WorkerUnavailable` after `close`."""
        with self._lock:
            if self._closed:
                raise WorkerUnavailable("this worker is stopping and reads no more pools")
            if key not in self._pools:
                self._pools[key] = ThreadPoolExecutor(self._threads_per_key, thread_name_prefix="peer")
            self._num_pending[key] += 1
            done = self._pools[key].submit(work)
        done.add_done_callback(lambda _: self._note_done(key))
        return done

    def sweep(self) -> None:
        """End the threads of keys without pending work."""
        with self._lock:
            idle = [self._pools.pop(key) for key in list(self._pools) if not self._num_pending[key]]
        for pool in idle:
            pool.shutdown(wait=False)

    def close(self) -> None:
        """Drop queued work. Running work is not awaited."""
        with self._lock:
            self._closed = True
            pools, self._pools = list(self._pools.values()), {}
        for pool in pools:
            pool.shutdown(wait=False, cancel_futures=True)

    def _note_done(self, key: Hashable) -> None:
        with self._lock:
            self._num_pending[key] -= 1
            if not self._num_pending[key]:
                del self._num_pending[key]


class Readers:
    """Opens a peer's pool once and keeps it until the peer restarts or dies, or until `close`. Safe from any thread.

    Opening may block, and so may closing during a read. Neither delays other callers. `threads` may wait for them.
    """

    def __init__(self, secret: str = "") -> None:
        self.threads = PeerThreads()
        self._secret = secret
        self._lock = threading.Lock()
        self._closed = False
        self._transports: dict[str, Transport] = {}
        self._open: dict[tuple[str, str], Reader] = {}

    def get(self, peer: str, export: PoolExport, layout: KVLayout, *, deadline: float = math.inf) -> Reader:
        """Return the reader of the pool that a peer's ticket names, opening it if necessary. Closes the peer's readers
        of earlier epochs. Raises what `Transport.open` raises, and `WorkerUnavailable` after `close`."""
        reader = self.get_open(peer, export, layout)
        if reader is None:
            key = (peer, export.kind)
            self._close_outdated(key, export, layout)
            if export.kind not in self._transports:
                self._transports[export.kind] = load_transport(export.kind, self._secret)
            reader = self._register(key, self._transports[export.kind].open(export, layout, deadline=deadline))
        return reader

    def get_open(self, peer: str, export: PoolExport, layout: KVLayout) -> Reader | None:
        """Return the reader of that very pool if it is open. Never blocks."""
        with self._lock:
            reader = self._open.get((peer, export.kind))
            return reader if reader is not None and _matches(reader, export, layout) else None

    def sweep(self) -> None:
        """Close readers whose owners are dead: the owners' memory is not freed before."""
        with self._lock:
            detached = self._detach([key for key, reader in self._open.items() if not reader.alive()])
        _close_all(detached)
        self.threads.sweep()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            detached = self._detach(list(self._open))
        _close_all(detached)
        self.threads.close()

    def _close_outdated(self, key: tuple[str, str], export: PoolExport, layout: KVLayout) -> None:
        """Close the peer's readers that cannot belong to its current pool."""
        with self._lock:
            of_peer = [(at, reader) for at, reader in self._open.items() if at[0] == key[0]]
            detached = self._detach(
                at
                for at, reader in of_peer
                if reader.export.epoch != export.epoch or (at == key and not _matches(reader, export, layout))
            )
        _close_all(detached)

    def _register(self, key: tuple[str, str], opened: Reader) -> Reader:
        """Keep the new reader, or return the one of the same pool that another thread opened meanwhile."""
        detached = []
        with self._lock:
            reader = self._open.get(key)
            same = reader is not None and (reader.export, reader.layout) == (opened.export, opened.layout)
            if not self._closed and not same:
                detached = self._detach([key])
                reader = self._open[key] = opened
        _close_all(detached if reader is opened else [opened])
        if reader is None:
            raise WorkerUnavailable("this worker is stopping and opens no more pools")
        return reader

    def _detach(self, keys: Iterable[tuple[str, str]]) -> list[Reader]:
        """Remove readers from the table. Close them without the lock, since closing waits for a running read."""
        return [self._open.pop(key) for key in keys if key in self._open]


def _close_all(readers: Iterable[Reader]) -> None:
    for reader in readers:
        reader.close()


def _matches(reader: Reader, export: PoolExport, layout: KVLayout) -> bool:
    """Return whether the reader is of that very pool, and its owner alive."""
    return (reader.export, reader.layout) == (export, layout) and reader.alive()
