"""`PeerThreads`: what waits for a peer's memory or network does so on threads of that peer's own. One that does not
answer holds up what is wanted of it, and nothing else.

`Readers`: the peers' pools that this worker has open, one a peer and transport."""

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


class Readers:
    """Opens a peer's pool once and keeps it until the peer restarts, dies, or this closes. Safe from any thread.
    Opening may block, as may closing while a read runs; neither keeps anybody else waiting. `threads` are for such."""

    def __init__(self, secret: str = "") -> None:
        self.threads = PeerThreads()
        self._secret = secret
        self._lock = threading.Lock()
        self._closed = False
        self._transports: dict[str, Transport] = {}
        self._open: dict[tuple[str, str], Reader] = {}

    def get(self, peer: str, export: PoolExport, layout: KVLayout, *, deadline: float = math.inf) -> Reader:
        """The reader of the pool that a peer's ticket speaks of. Those of an earlier epoch are closed. Errors as
        `Transport.open`, and `WorkerUnavailable` once this is closed."""
        reader = self.at_hand(peer, export, layout)
        if reader is None:
            key = (peer, export.kind)
            self._part_from_others(key, export, layout)
            reader = self._kept(key, self._transport(export.kind).open(export, layout, deadline=deadline))
        return reader

    def at_hand(self, peer: str, export: PoolExport, layout: KVLayout) -> Reader | None:
        """The reader of that very pool if it is open. Waits for nothing."""
        with self._lock:
            reader = self._open.get((peer, export.kind))
            return reader if reader is not None and _is_of(reader, export, layout) else None

    def sweep(self) -> None:
        """Close what belongs to owners that are dead: their memory stays taken until then."""
        with self._lock:
            parted = self._taken([key for key, reader in self._open.items() if not reader.alive()])
        _close(parted)
        self.threads.sweep()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            parted = self._taken(list(self._open))
        _close(parted)
        self.threads.close()

    def _part_from_others(self, key: tuple[str, str], export: PoolExport, layout: KVLayout) -> None:
        """Close what cannot be the peer's pool any more."""
        with self._lock:
            of_peer = [(at, reader) for at, reader in self._open.items() if at[0] == key[0]]
            parted = self._taken(
                at
                for at, reader in of_peer
                if reader.export.epoch != export.epoch or (at == key and not _is_of(reader, export, layout))
            )
        _close(parted)

    def _kept(self, key: tuple[str, str], opened: Reader) -> Reader:
        """The new reader, or the one of the same pool that another thread opened meanwhile."""
        parted = []
        with self._lock:
            reader = self._open.get(key)
            if not self._closed and (reader is None or not _same_pool(reader, opened)):
                parted = self._taken([key])
                reader = self._open[key] = opened
        _close(parted if reader is opened else [opened])
        if reader is None:
            raise WorkerUnavailable("this worker opens no more pools: it is stopping")
        return reader

    def _taken(self, keys: Iterable[tuple[str, str]]) -> list[Reader]:
        """Found by nobody any more; to be closed without the lock, as a close waits for the read that runs."""
        return [self._open.pop(key) for key in keys if key in self._open]

    def _transport(self, kind: str) -> Transport:
        if kind not in self._transports:
            self._transports[kind] = load_transport(kind, self._secret)
        return self._transports[kind]


def _close(readers: Iterable[Reader]) -> None:
    for reader in readers:
        reader.close()


def _is_of(reader: Reader, export: PoolExport, layout: KVLayout) -> bool:
    """Whether it reads that very pool, and its owner is alive."""
    return (reader.export, reader.layout) == (export, layout) and reader.alive()


def _same_pool(one: Reader, other: Reader) -> bool:
    return (one.export, one.layout) == (other.export, other.layout)
