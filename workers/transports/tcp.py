"""Between hosts: the source sends its blocks over a byte stream (`wire.py`), and looks at their generations itself,
before and after it copies each piece (`lender.py`).

Pieces are a few blocks each. The owner holds one of them, the reader one; the next is not copied before the one before
has been taken, so that a slow reader costs the owner a thread and no memory.
"""

from __future__ import annotations

import json
import math
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from workers.api.errors import CacheStale, DeadlineExceeded, TransferCorrupted, TransferFailed, from_reply
from workers.api.schemas import KVLayout, PoolExport, Site
from workers.pool.blocks import block_bytes, block_shape, torch_dtype
from workers.pool.segment import Header
from workers.transports.base import CopyBuffer, Reader, Transport, check_header, check_layout, text_at
from workers.transports.wire import Channel, FrameKind

CONNECT_S = 2.0
FRESH_S = 30.0  # an idle stream is given up well before its owner gives it up
PIECE_BYTES = 2**20
_MOST_WORDS_BYTES = 4096  # of a welcome, or of an error


class TcpReader(Reader):
    """A peer's blocks over one connection. What goes wrong on it ends it; `Readers` then opens another."""

    waits = True

    def __init__(self, export: PoolExport, layout: KVLayout, channel: Channel):
        super().__init__(export, layout, "cpu")
        self._channel = channel
        self._broken = False
        self._used_at = time.monotonic()

    def close(self) -> None:
        """A read that runs does not hold it up: it fails."""
        self._channel.interrupt()
        super().close()

    def _owner_alive(self) -> bool:
        if not self._lock.acquire(blocking=False):
            return True  # a read is under way, and will tell
        try:
            fresh = time.monotonic() - self._used_at < FRESH_S
            return fresh and not self._broken and not self._channel.has_news()
        finally:
            self._lock.release()

    @contextmanager
    def _lent(
        self, blocks: Sequence[int], generations: Sequence[int], deadline: float, room: CopyBuffer
    ) -> Iterator[tuple[Tensor, Sequence[int]]]:
        shape = (len(blocks), *block_shape(self.layout))
        into = room.take(shape, torch_dtype(self.layout.dtype), "cpu")
        self._channel.deadline = deadline
        try:
            self._check_in_step()
            self._channel.send(FrameKind.READ, pack_blocks(blocks, generations))
            at = 0
            while at < len(into):
                at += self._take_piece(into[at:])
        except (TransferFailed, DeadlineExceeded):
            self._broken = True  # what is still to come belongs to this read, and no other may take it for its own
            self._channel.interrupt()
            raise
        self._used_at = time.monotonic()
        yield into, range(len(blocks))

    def _check_in_step(self) -> None:
        """Nothing stands in the stream before a read asks. Raises what its owner said when it closed its pool."""
        if self._broken:
            raise TransferFailed("the stream broke off in another read")
        if self._channel.has_news():
            self._receive(0)
            raise TransferFailed("blocks came that nobody had asked for")

    def _take_piece(self, into: Tensor) -> int:
        """Copy the next blocks to the beginning of `into`, the room for all that are to come; how many there were."""
        each = block_bytes(self.layout)
        payload = self._receive(len(into) * each)
        num_blocks = len(payload) // each
        if num_blocks * each != len(payload) or not num_blocks:
            raise TransferFailed(f"{len(payload)} bytes arrived; a block takes {each}")
        piece = torch.frombuffer(payload, dtype=into.dtype)
        into[:num_blocks] = piece.view(num_blocks, *into.shape[1:])
        return num_blocks

    def _receive(self, most_bytes: int) -> memoryview:
        kind, payload = self._channel.receive(max(most_bytes, _MOST_WORDS_BYTES))
        if kind is FrameKind.FAILED:
            words = json.loads(bytes(payload))
            raise from_reply(words["status"], words)
        if kind is not FrameKind.BLOCKS:
            raise TransferFailed(f"blocks were asked for; a frame of kind {kind.name} came")
        return payload

    def _unmap(self) -> None:
        self._channel.close()


class TcpTransport(Transport):
    kind = "tcp"

    def __init__(self, secret: str):
        self._secret = secret

    @classmethod
    def create(cls, secret: str) -> Transport:
        return cls(secret)

    @staticmethod
    def reaches(export: PoolExport, site: Site) -> bool:
        return True  # a network is known by trying

    def open(self, export: PoolExport, layout: KVLayout, *, deadline: float = math.inf) -> Reader:
        check_layout(layout)
        channel = Channel(_connect(export, deadline))
        try:
            channel.deadline = min(deadline, time.monotonic() + CONNECT_S)
            channel.answer(self._secret)
            kind, payload = channel.receive(_MOST_WORDS_BYTES)
            if kind is not FrameKind.WELCOME:
                raise TransferFailed(f"a welcome was expected; a frame of kind {kind.name} came")
            check_header(Header.unpack(bytes(payload)), export, layout, blocks_inside=True)
            return TcpReader(export, layout, channel)
        except BaseException:
            channel.close()
            raise


def pack_blocks(blocks: Sequence[int], generations: Sequence[int]) -> bytes:
    """The payload of a `READ`: both lists, one after the other."""
    return np.asarray([*blocks, *generations], dtype="<i8").tobytes()


def unpack_blocks(payload: memoryview) -> tuple[list[int], list[int]]:
    """Raises `TransferCorrupted` for what is no such payload."""
    if len(payload) % 16:
        raise TransferCorrupted(f"blocks and their generations take 16 bytes each; {len(payload)} came")
    blocks, generations = np.frombuffer(payload, dtype="<i8").reshape(2, -1).tolist()
    return blocks, generations


def _connect(export: PoolExport, deadline: float) -> socket.socket:
    address = (text_at(export, "address"), export.address.get("port"))
    left_s = min(CONNECT_S, deadline - time.monotonic())
    if left_s <= 0:
        raise DeadlineExceeded("no time left to open a stream of blocks")
    try:
        sock = socket.create_connection(address, timeout=left_s)
    except ConnectionRefusedError as error:
        raise CacheStale(f"the pool at {address[0]}:{address[1]} is gone: nobody listens there") from error
    except (OSError, TypeError, ValueError, OverflowError) as error:
        raise TransferFailed(f"the pool at {address[0]}:{address[1]} can't be reached: {error}") from error
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return sock
