"""`Tap`: a wire between a reader and a lender that can be listened to, and that fails where it is told to."""

from __future__ import annotations

import contextlib
import socket
import threading
from dataclasses import dataclass, field
from typing import Literal

from workers.api.schemas import PoolExport

Way = Literal["to_owner", "to_reader"]


@dataclass
class Tap:
    """Forwards to the lender behind `export`, and keeps what passed. The byte at `flip` of that direction is changed;
    from the byte at `stop` on nothing passes any more, from the byte at `wait` on not before the `gate` is open, and at
    `cut` the connection ends."""

    behind: PoolExport
    flip: dict[Way, int] = field(default_factory=dict)
    stop: dict[Way, int] = field(default_factory=dict)
    cut: dict[Way, int] = field(default_factory=dict)
    wait: dict[Way, int] = field(default_factory=dict)
    gate: threading.Event = field(default_factory=threading.Event)
    passed: dict[Way, bytearray] = field(
        default_factory=lambda: {"to_owner": bytearray(), "to_reader": bytearray()}
    )

    def __post_init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def export(self) -> PoolExport:
        return self.behind.model_copy(
            update={"address": {"address": "127.0.0.1", "port": self._listener.getsockname()[1]}}
        )

    def close(self) -> None:
        for sock in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def __enter__(self) -> Tap:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                reader, _ = self._listener.accept()
                address = self.behind.address
                owner = socket.create_connection((str(address["address"]), int(address["port"])))
                self._sockets += [reader, owner]
                for way, here, there in (("to_owner", reader, owner), ("to_reader", owner, reader)):
                    threading.Thread(target=self._pump, args=(way, here, there), daemon=True).start()

    def _pump(self, way: Way, here: socket.socket, there: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while content := bytearray(here.recv(4096)):
                begin = len(self.passed[way])
                self.passed[way] += content
                at = self.flip.get(way, -1) - begin
                if 0 <= at < len(content):
                    content[at] ^= 1
                if self.cut.get(way, 2**62) < begin + len(content):
                    break
                if self.wait.get(way, 2**62) < begin + len(content):
                    self.gate.wait(10)
                there.sendall(content[: max(0, self.stop.get(way, 2**62) - begin)])
            for sock in (here, there):
                sock.shutdown(socket.SHUT_RDWR)
