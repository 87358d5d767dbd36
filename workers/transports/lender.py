"""`Lender`: the serving side of `tcp`, in the worker that owns the pool.

    accept ──► authenticate (HANDSHAKE_S) ──► welcome ──► one READ at a time ──► its blocks, piece by piece
                                                 └── idle for IDLE_S, or the worker stops: closed

There is one thread per connection, and a bound on connections. A thread copies one piece, sends it, and copies the next
once that has been received.
"""

from __future__ import annotations

import json
import logging
import math
import socket
import threading
import time
from collections.abc import Iterator, Sequence

import torch

from workers.api.addresses import listen
from workers.api.errors import CacheStale, KvrelayError, TransferFailed
from workers.api.schemas import PoolExport
from workers.pool.arena import Arena
from workers.pool.blocks import check_blocks
from workers.pool.segment import Header
from workers.transports.base import check_generations
from workers.transports.tcp import PIECE_BYTES, unpack_blocks
from workers.transports.wire import STALL_S, Channel, FrameKind, shut

log = logging.getLogger(__name__)

HANDSHAKE_S = 2.0
IDLE_S = 60.0
MAX_CONNECTIONS = 32
CLOSE_S = 0.5


class Lender:
    """Listens from the start, accepts connections from `start` on. Readers connect to `advertised_host`, by default
    `host`."""

    def __init__(
        self,
        arena: Arena,
        secret: str,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        advertised_host: str | None = None,
        idle_s: float = IDLE_S,
        stall_s: float = STALL_S,
        max_connections: int = MAX_CONNECTIONS,
    ):
        """Raises `OSError` if it cannot listen."""
        self._arena = arena
        self._secret = secret
        self._idle_s = idle_s
        self._stall_s = stall_s
        self._max_connections = max_connections
        self._lock = threading.Lock()
        self._closing = False
        self._serving: dict[threading.Thread, socket.socket] = {}
        self._listener = listen(host, port, backlog=max_connections)
        self._acceptor = threading.Thread(target=self._accept_loop, name="kvrelay-lend", daemon=True)
        port = self._listener.getsockname()[1]
        self.export = PoolExport(
            kind="tcp",
            address={"address": advertised_host or host, "port": port},
            num_blocks=arena.num_blocks,
            epoch=arena.epoch,
        )

    @property
    def num_connections(self) -> int:
        with self._lock:
            return len(self._serving)

    def start(self) -> None:
        self._acceptor.start()

    def close(self) -> None:
        """Stop accepting, notify all readers, and wait until no thread uses the arena. Idempotent."""
        with self._lock:
            self._closing = True
            serving = dict(self._serving)
        shut(self._listener, socket.SHUT_RDWR)  # wakes the acceptor
        if self._acceptor.ident is not None:
            self._acceptor.join()
        self._listener.close()
        for sock in serving.values():
            shut(sock, socket.SHUT_RD)  # a thread that waits for a request sends its reader an error
        self._join(serving, CLOSE_S)
        for sock in serving.values():
            shut(sock, socket.SHUT_RDWR)
        self._join(serving, None)

    def _join(self, serving: dict[threading.Thread, socket.socket], within_s: float | None) -> None:
        end = None if within_s is None else time.monotonic() + within_s
        for thread in serving:
            thread.join(None if end is None else max(0.0, end - time.monotonic()))

    def _accept_loop(self) -> None:
        while not self._closing:
            try:
                self._begin(self._listener.accept()[0])
            except (OSError, RuntimeError) as error:
                if not self._closing:
                    log.warning("accepting a reader failed: %s", error)
                    time.sleep(0.1)  # for example, out of descriptors or threads

    def _begin(self, sock: socket.socket) -> None:
        thread = threading.Thread(target=self._serve, args=(sock,), name="kvrelay-lend-one", daemon=True)
        with self._lock:
            if self._closing or len(self._serving) >= self._max_connections:
                sock.close()
                return
            thread.start()
            self._serving[thread] = sock

    def _serve(self, sock: socket.socket) -> None:
        channel = Channel(sock, stall_s=self._stall_s)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._welcome(channel)
            while True:
                self._answer(channel)
        except (KvrelayError, OSError) as error:
            log.info("a reader's stream ended: %s", error)
        finally:
            channel.close()
            with self._lock:
                del self._serving[threading.current_thread()]

    def _welcome(self, channel: Channel) -> None:
        channel.deadline = time.monotonic() + HANDSHAKE_S
        channel.greet(self._secret)
        arena = self._arena
        channel.send(FrameKind.WELCOME, Header(arena.num_blocks, arena.block_bytes, arena.epoch).pack())
        channel.deadline = math.inf

    def _answer(self, channel: Channel) -> None:
        """Wait for one request, up to `idle_s`, and answer it."""
        blocks, generations = self._next_request(channel)
        pieces = self._pieces(blocks, generations)
        while True:
            try:
                piece = next(pieces, None)
            except KvrelayError as error:
                _send_error(channel, error)
                return
            if piece is None:
                return
            channel.send(FrameKind.BLOCKS, piece)

    def _next_request(self, channel: Channel) -> tuple[list[int], list[int]]:
        channel.stall_s = self._idle_s
        try:
            kind, payload = channel.receive(16 * self._arena.num_blocks)
        except TransferFailed:
            if self._closing:
                _send_error(channel, self._closed())
            raise
        finally:
            channel.stall_s = self._stall_s
        if kind is not FrameKind.READ:
            raise TransferFailed(f"expected a read, got a {kind.name} frame")
        return unpack_blocks(payload)

    def _pieces(self, blocks: Sequence[int], generations: Sequence[int]) -> Iterator[memoryview]:
        """Yield the content of these blocks, a few at a time. Raises what `Reader.read` raises."""
        check_blocks(blocks, self._arena.num_blocks, TransferFailed)
        step = max(1, PIECE_BYTES // self._arena.block_bytes)
        for at in range(0, len(blocks), step):
            if self._closing:
                raise self._closed()
            yield self._copy(blocks[at : at + step], generations[at : at + step])

    def _copy(self, blocks: Sequence[int], generations: Sequence[int]) -> memoryview:
        """Copy these blocks to host memory, between two checks of the generations."""
        check_generations(self._arena.generations, blocks, generations)
        copy = self._bytes(blocks)
        check_generations(self._arena.generations, blocks, generations)
        return copy

    def _bytes(self, blocks: Sequence[int]) -> memoryview:
        rows = self._arena.data.flatten(1).view(torch.uint8)
        if rows.device.type == "cpu":  # by NumPy, which starts no threads: the engine has one for each core
            return rows.numpy()[list(blocks)].reshape(-1).data
        return rows[list(blocks)].cpu().reshape(-1).numpy().data

    def _closed(self) -> CacheStale:
        return CacheStale(f"the owner has closed the pool of epoch {self._arena.epoch}")


def _send_error(channel: Channel, error: KvrelayError) -> None:
    channel.send(FrameKind.FAILED, json.dumps(error.body() | {"status": error.status}).encode())
