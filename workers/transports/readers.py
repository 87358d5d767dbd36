"""`Readers`: the peers' pools that this worker has open, one a peer."""

from __future__ import annotations

import threading

from workers.api.schemas import KVLayout, PoolExport
from workers.transports import load_transport
from workers.transports.base import Reader, Transport


class Readers:
    """Opens a peer's pool once and keeps it until the peer restarts, dies, or this closes. Safe from any thread;
    opening may block."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._transports: dict[str, Transport] = {}
        self._by_peer: dict[str, Reader] = {}

    def get(self, peer: str, export: PoolExport, layout: KVLayout) -> Reader:
        """The reader of the pool that a peer's ticket speaks of. One of an earlier epoch is closed. Errors as
        `Transport.open`."""
        with self._lock:
            reader = self._by_peer.get(peer)
            if reader is not None and (reader.export, reader.layout) == (export, layout) and reader.alive():
                return reader
            self._drop(peer)
            reader = self._transport(export.kind).open(export, layout)
            self._by_peer[peer] = reader
            return reader

    def sweep(self) -> None:
        """Close what belongs to owners that are dead: their memory stays taken until then."""
        with self._lock:
            for peer in [peer for peer, reader in self._by_peer.items() if not reader.alive()]:
                self._drop(peer)

    def close(self) -> None:
        with self._lock:
            for peer in list(self._by_peer):
                self._drop(peer)

    @property
    def peers(self) -> list[str]:
        """The peers whose pools are open."""
        with self._lock:
            return list(self._by_peer)

    def _drop(self, peer: str) -> None:
        reader = self._by_peer.pop(peer, None)
        if reader is not None:
            reader.close()

    def _transport(self, kind: str) -> Transport:
        if kind not in self._transports:
            self._transports[kind] = load_transport(kind)
        return self._transports[kind]
