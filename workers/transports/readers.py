"""`Readers`: the peers' pools that this worker has open, one a peer and transport."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable

from workers.api.errors import WorkerUnavailable
from workers.api.schemas import KVLayout, PoolExport
from workers.transports import load_transport
from workers.transports.base import Reader, Transport
from workers.transports.threads import PeerThreads


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
