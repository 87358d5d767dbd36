"""`Tap`: a proxy between a reader and a lender that records the traffic, and fails at a given byte."""

from __future__ import annotations

import contextlib
import socket
import threading
from dataclasses import dataclass, field
from typing import Literal

from workers.api.schemas import PoolExport

Direction = Literal["to_owner", "to_reader"]


@dataclass
class Tap:
    """Forwards to the lender `behind` it and records the traffic in `passed`, by direction.

    The byte at `flip` is changed, nothing is forwarded from the byte at `stop` on, or from the byte at `wait` on until
    the `gate` is set. The connection ends at the byte at `cut`.
    """

    behind: PoolExport
    flip: dict[Direction, int] = field(default_factory=dict)
    stop: dict[Direction, int] = field(default_factory=dict)
    cut: dict[Direction, int] = field(default_factory=dict)
    wait: dict[Direction, int] = field(default_factory=dict)
    gate: threading.Event = field(default_factory=threading.Event)
    passed: dict[Direction, bytearray] = field(
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
                for direction, here, there in (("to_owner", reader, owner), ("to_reader", owner, reader)):
                    threading.Thread(target=self._pump, args=(direction, here, there), daemon=True).start()

    def _pump(self, direction: Direction, here: socket.socket, there: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while content := bytearray(here.recv(4096)):
                begin = len(self.passed[direction])
                self.passed[direction] += content
                at = self.flip.get(direction, -1) - begin
                if 0 <= at < len(content):
                    content[at] ^= 1
                if self.cut.get(direction, 2**62) < begin + len(content):
                    break
                if self.wait.get(direction, 2**62) < begin + len(content):
                    self.gate.wait(10)
                there.sendall(content[: max(0, self.stop.get(direction, 2**62) - begin)])
            for sock in (here, there):
                sock.shutdown(socket.SHUT_RDWR)
