"""`Readers`: the peers' pools that this worker has open, one a peer and transport."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable

from workers.api.errors import WorkerUnavailable
from workers.api.schemas import KVLayout, PoolExport
from workers.transports import load_transport
from workers.transports.base import Reader, Transport


class Readers:
    """Opens a peer's pool once and keeps it until the peer restarts, dies, or this closes. Safe from any thread;
    opening may block, and then keeps nobody else waiting."""

    def __init__(self, secret: str = "") -> None:
        self._secret = secret
        self._lock = threading.Lock()
        self._closed = False
        self._transports: dict[str, Transport] = {}
        self._open: dict[tuple[str, str], Reader] = {}

    def get(self, peer: str, export: PoolExport, layout: KVLayout, *, deadline: float = math.inf) -> Reader:
        """The reader of the pool that a peer's ticket speaks of. Those of an earlier epoch are closed. Errors as
        `Transport.open`, and `WorkerUnavailable` once this is closed."""
        key = (peer, export.kind)
        reader = self._standing(key, export, layout)
        if reader is None:
            reader = self._kept(key, self._transport(export.kind).open(export, layout, deadline=deadline))
        return reader

    def sweep(self) -> None:
        """Close what belongs to owners that are dead: their memory stays taken until then."""
        with self._lock:
            self._drop([key for key, reader in self._open.items() if not reader.alive()])

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._drop(list(self._open))

    @property
    def peers(self) -> list[str]:
        """The peers whose pools are open."""
        with self._lock:
            return sorted({peer for peer, _ in self._open})

    def _standing(self, key: tuple[str, str], export: PoolExport, layout: KVLayout) -> Reader | None:
        """The open reader of that very pool, if there is one; what cannot be it any more is closed."""
        with self._lock:
            reader = self._open.get(key)
            if reader is not None and (reader.export, reader.layout) == (export, layout) and reader.alive():
                return reader
            self._drop([key, *self._of_other_epochs(key[0], export.epoch)])
            return None

    def _kept(self, key: tuple[str, str], opened: Reader) -> Reader:
        """The new reader, or the one of the same pool that another thread opened meanwhile."""
        with self._lock:
            reader = self._open.get(key)
            if not self._closed and (reader is None or not _same_pool(reader, opened)):
                self._drop([key])
                reader = self._open[key] = opened
        if reader is not opened:
            opened.close()
        if reader is None:
            raise WorkerUnavailable("this worker opens no more pools: it is stopping")
        return reader

    def _of_other_epochs(self, peer: str, epoch: str) -> list[tuple[str, str]]:
        return [key for key, reader in self._open.items() if key[0] == peer and reader.export.epoch != epoch]

    def _drop(self, keys: Iterable[tuple[str, str]]) -> None:
        for key in keys:
            reader = self._open.pop(key, None)
            if reader is not None:
                reader.close()

    def _transport(self, kind: str) -> Transport:
        if kind not in self._transports:
            self._transports[kind] = load_transport(kind, self._secret)
        return self._transports[kind]


def _same_pool(one: Reader, other: Reader) -> bool:
    return (one.export, one.layout) == (other.export, other.layout)
