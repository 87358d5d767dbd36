"""Between hosts: the source sends its blocks over a byte stream (`wire.py`). It checks their generations itself, before
and after it copies each piece (`lender.py`).

A piece is a few blocks. Owner and reader hold one piece each, and the next is copied only once the last has been
received. So a slow reader costs the owner a thread and no memory.
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
FRESH_S = 30.0  # an idle stream is abandoned well before its owner closes it
PIECE_BYTES = 2**20
_MAX_MESSAGE_BYTES = 4096  # of a welcome or an error


class TcpReader(Reader):
    """A peer's blocks over one connection. Any failure ends it; `Readers` then opens another."""

    uses_network = True

    def __init__(self, export: PoolExport, layout: KVLayout, channel: Channel):
        super().__init__(export, layout, "cpu")
        self._channel = channel
        self._broken = False
        self._used_at = time.monotonic()

    def close(self) -> None:
        """Close at once; a running read fails."""
        self._channel.interrupt()
        super().close()

    def _owner_alive(self) -> bool:
        if not self._lock.acquire(blocking=False):
            return True  # a running read will find out
        try:
            fresh = time.monotonic() - self._used_at < FRESH_S
            return fresh and not self._broken and not self._channel.has_input()
        finally:
            self._lock.release()

    @contextmanager
    def _access(
        self, blocks: Sequence[int], generations: Sequence[int], deadline: float, buffer: CopyBuffer
    ) -> Iterator[tuple[Tensor, Sequence[int]]]:
        shape = (len(blocks), *block_shape(self.layout))
        into = buffer.take(shape, torch_dtype(self.layout.dtype), "cpu")
        self._channel.deadline = deadline
        try:
            self._check_idle()
            self._channel.send(FrameKind.READ, pack_blocks(blocks, generations))
            at = 0
            while at < len(into):
                at += self._take_piece(into[at:])
        except (TransferFailed, DeadlineExceeded):
            self._broken = True  # what still arrives belongs to this read, and to no later one
            self._channel.interrupt()
            raise
        self._used_at = time.monotonic()
        yield into, range(len(blocks))

    def _check_idle(self) -> None:
        """Check that no data precedes a request. Raises the error that an owner sends when it closes its pool."""
        if self._broken:
            raise TransferFailed("the stream broke in an earlier read")
        if self._channel.has_input():
            self._receive(0)
            raise TransferFailed("blocks arrived without a request")

    def _take_piece(self, into: Tensor) -> int:
        """Receive the next blocks into the beginning of `into`, and return how many there were."""
        each = block_bytes(self.layout)
        payload = self._receive(len(into) * each)
        num_blocks = len(payload) // each
        if num_blocks * each != len(payload) or not num_blocks:
            raise TransferFailed(f"{len(payload)} bytes arrived; they must be whole blocks of {each}")
        piece = torch.frombuffer(payload, dtype=into.dtype)
        into[:num_blocks] = piece.view(num_blocks, *into.shape[1:])
        return num_blocks

    def _receive(self, max_bytes: int) -> memoryview:
        kind, payload = self._channel.receive(max(max_bytes, _MAX_MESSAGE_BYTES))
        if kind is FrameKind.FAILED:
            body = json.loads(bytes(payload))
            raise from_reply(body["status"], body)
        if kind is not FrameKind.BLOCKS:
            raise TransferFailed(f"expected blocks, got a {kind.name} frame")
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
        return True  # only an attempt can tell

    def open(self, export: PoolExport, layout: KVLayout, *, deadline: float = math.inf) -> Reader:
        check_layout(layout)
        channel = Channel(_connect(export, deadline))
        try:
            channel.deadline = min(deadline, time.monotonic() + CONNECT_S)
            channel.answer(self._secret)
            kind, payload = channel.receive(_MAX_MESSAGE_BYTES)
            if kind is not FrameKind.WELCOME:
                raise TransferFailed(f"expected a welcome, got a {kind.name} frame")
            check_header(Header.unpack(bytes(payload)), export, layout, blocks_inside=True)
            return TcpReader(export, layout, channel)
        except BaseException:
            channel.close()
            raise


def pack_blocks(blocks: Sequence[int], generations: Sequence[int]) -> bytes:
    """Encode the payload of a `READ`: both lists, one after the other."""
    return np.asarray([*blocks, *generations], dtype="<i8").tobytes()


def unpack_blocks(payload: memoryview) -> tuple[list[int], list[int]]:
    """Decode the payload of a `READ`. Raises `TransferCorrupted`."""
    if len(payload) % 16:
        raise TransferCorrupted(f"each block and generation need 16 bytes; got {len(payload)} bytes")
    blocks, generations = np.frombuffer(payload, dtype="<i8").reshape(2, -1).tolist()
    return blocks, generations


def _connect(export: PoolExport, deadline: float) -> socket.socket:
    address = (text_at(export, "address"), export.address.get("port"))
    remaining_s = min(CONNECT_S, deadline - time.monotonic())
    if remaining_s <= 0:
        raise DeadlineExceeded("the deadline passed before a stream of blocks was opened")
    try:
        sock = socket.create_connection(address, timeout=remaining_s)
    except ConnectionRefusedError as error:
        raise CacheStale(f"the pool at {address[0]}:{address[1]} is gone: nothing listens there") from error
    except (OSError, TypeError, ValueError, OverflowError) as error:
        raise TransferFailed(f"the pool at {address[0]}:{address[1]} cannot be reached: {error}") from error
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return sock
