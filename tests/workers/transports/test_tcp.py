"""The stream between hosts: authentication, changed bytes, deadlines, bounds."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from mappers.cache import KVCache
from tests.workers.pool.support import LAYOUT, assert_same, random_kv
from tests.workers.transports.owner import SECRET, LocalOwner
from tests.workers.transports.tap import Direction, Tap
from workers.api.errors import CacheStale, DeadlineExceeded, KvrelayError, TransferCorrupted, TransferFailed
from workers.api.schemas import KVLayout, PoolExport, Ticket
from workers.pool import new_epoch
from workers.pool.arena import HeapArena
from workers.pool.blocks import block_bytes, copy_in
from workers.transports.base import Reader
from workers.transports.lender import Lender
from workers.transports.tcp import TcpTransport, pack_blocks
from workers.transports.wire import Channel, FrameKind

torch.set_num_threads(1)

GREETING = 16 + 32  # bytes
WELCOME = GREETING + 8 + 72 + 16
BIG = LAYOUT.model_copy(update={"num_layers": 16, "block_tokens": 64, "head_dim": 64})  # a block is 1 MiB: one piece


@pytest.fixture
def owner() -> Iterator[LocalOwner]:
    owner = LocalOwner("tcp")
    yield owner
    owner.close()


@pytest.fixture
def lend() -> Iterator[Callable[..., Lender]]:
    """Start lenders over plain memory with given bounds."""
    lenders: list[Lender] = []

    def start(num_blocks: int = 4, kind: type[Lender] = Lender, **bounds: Any) -> Lender:
        lenders.append(kind(HeapArena(BIG, num_blocks, new_epoch()), SECRET, **bounds))
        lenders[-1].start()
        return lenders[-1]

    yield start
    for lender in lenders:
        lender.close()


Opened = Callable[..., Reader]


@pytest.fixture
def opened() -> Iterator[Opened]:
    readers: list[Reader] = []

    def open_reader(export: PoolExport, secret: str = SECRET, layout: KVLayout = LAYOUT) -> Reader:
        readers.append(TcpTransport(secret).open(export, layout))
        return readers[-1]

    yield open_reader
    for reader in readers:
        reader.close()


def read(reader: Reader, ticket: Ticket, *, deadline_s: float = 20.0) -> KVCache:
    return reader.read(ticket.blocks, ticket.generations, 0, 14, deadline=time.monotonic() + deadline_s)


def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.005)


# -- bytes that change ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("direction", "at"),
    [
        ("to_reader", GREETING + 9),  # the welcome
        ("to_reader", WELCOME),  # the kind of the blocks' frame
        ("to_reader", WELCOME + 8 + 1000),  # their content
        ("to_reader", WELCOME + 8 + 4 * block_bytes(LAYOUT) + 3),  # their code
    ],
)
def test_changed_byte_is_detected(owner: LocalOwner, direction: Direction, at: int, opened: Opened) -> None:
    ticket = owner.ticket(14)
    with Tap(ticket.pool, flip={direction: at}) as tap:
        with pytest.raises(TransferCorrupted, match="was changed on the way"):
            read(opened(tap.export), ticket)
        assert len(tap.passed[direction]) > at
    assert_same(read(opened(ticket.pool), ticket), random_kv(0, 14))


def test_changed_request_is_not_answered(owner: LocalOwner, opened: Opened) -> None:
    ticket = owner.ticket(14)
    with Tap(ticket.pool, flip={"to_owner": GREETING + 32 + 8}) as tap:
        reader = opened(tap.export)
        with pytest.raises(TransferFailed, match="closed the stream"):
            read(reader, ticket)
        assert len(tap.passed["to_reader"]) == WELCOME and not reader.alive()


# -- authentication --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("secret", ["another secret", SECRET + "x"])
def test_reader_without_secret_receives_only_greeting(owner: LocalOwner, secret: str, opened: Opened) -> None:
    ticket = owner.ticket(14)
    with Tap(ticket.pool) as tap, pytest.raises(TransferFailed, match="closed the stream"):
        opened(tap.export, secret)
    assert len(tap.passed["to_reader"]) == GREETING


def test_owner_without_secret_is_rejected(opened: Opened) -> None:
    impostor = HeapArena(LAYOUT, 16, new_epoch())
    lender = UncheckedLender(impostor, "what an impostor knows")
    lender.start()
    with pytest.raises(TransferCorrupted):
        opened(lender.export)
    lender.close()


class UncheckedLender(Lender):
    """A lender that accepts any proof."""

    def _welcome(self, channel: Channel) -> None:
        channel._send(b"KVRELAY-TCP/1\0\0\0" + bytes(32))
        channel._receive_exactly(GREETING + 32)
        channel._agree("what an impostor knows", bytes(64), send=b"owner", receive=b"reader")
        channel.send(FrameKind.WELCOME, bytes(72))


def test_empty_secret_is_rejected(owner: LocalOwner, opened: Opened) -> None:
    with pytest.raises(TransferFailed, match="needs the cluster secret"):
        opened(owner.ticket(8).pool, "")


def test_handshake_hides_secret_and_rejects_replay(owner: LocalOwner, opened: Opened) -> None:
    ticket = owner.ticket(14)
    with Tap(ticket.pool) as tap:
        read(opened(tap.export), ticket)
    sent = bytes(tap.passed["to_owner"])
    assert SECRET.encode() not in sent + bytes(tap.passed["to_reader"])
    address = ticket.pool.address
    with socket.create_connection((str(address["address"]), int(address["port"]))) as replaying:
        replaying.settimeout(10)
        received = b""
        with contextlib.suppress(ConnectionError):
            replaying.sendall(sent)
            while more := replaying.recv(4096):
                received += more
    assert len(received) == GREETING


# -- deadlines --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [10, WELCOME - 1], ids=["greeting", "welcome"])
def test_open_ends_at_deadline(owner: LocalOwner, at: int) -> None:
    with Tap(owner.ticket(8).pool, stop={"to_reader": at}) as tap:
        began = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            TcpTransport(SECRET).open(tap.export, LAYOUT, deadline=began + 0.2)
        assert time.monotonic() - began < 1.5


def test_read_ends_at_deadline_even_while_another_runs(owner: LocalOwner, opened: Opened) -> None:
    ticket = owner.ticket(14)
    with Tap(ticket.pool, stop={"to_reader": WELCOME + 100}) as tap:
        reader, times = opened(tap.export), []

        def read_until(deadline_s: float) -> None:
            began = time.monotonic()
            with pytest.raises(DeadlineExceeded):
                read(reader, ticket, deadline_s=deadline_s)
            times.append(time.monotonic() - began)

        first = threading.Thread(target=read_until, args=(0.6,))
        first.start()
        until(lambda: len(tap.passed["to_owner"]) > GREETING + 32)
        read_until(0.1)
        assert reader.alive()  # a read is running
        first.join()
        assert len(times) == 2 and times[0] < 0.5 and times[1] < 2.0
        assert not reader.alive()


def test_read_ignores_data_of_abandoned_read(owner: LocalOwner, opened: Opened) -> None:
    """The reply to the first read arrives during the second."""
    one, other = owner.ticket(14, seed=1), owner.ticket(14, seed=2)
    with Tap(one.pool, wait={"to_reader": WELCOME}) as tap:
        reader = opened(tap.export)
        with pytest.raises(DeadlineExceeded):
            read(reader, one, deadline_s=0.3)
        tap.gate.set()
        with pytest.raises(TransferFailed, match="broke in an earlier read"):
            read(reader, other)


def test_close_ends_waiting_read(owner: LocalOwner, opened: Opened) -> None:
    ticket = owner.ticket(14)
    with Tap(ticket.pool, stop={"to_reader": WELCOME}) as tap:
        reader, errors = opened(tap.export), []

        def read_blocked() -> None:
            try:
                read(reader, ticket)
            except KvrelayError as error:
                errors.append(error)

        thread = threading.Thread(target=read_blocked)
        thread.start()
        until(lambda: len(tap.passed["to_owner"]) > GREETING + 32)
        reader.close()
        thread.join(2)
        assert [type(error) for error in errors] == [TransferFailed]


def test_broken_stream_is_not_reused(owner: LocalOwner, opened: Opened) -> None:
    ticket = owner.ticket(14)
    with Tap(ticket.pool, cut={"to_reader": WELCOME + 500}) as tap:
        reader = opened(tap.export)
        with pytest.raises(TransferFailed):
            read(reader, ticket)
        assert not reader.alive()


# -- pieces -----------------------------------------------------------------------------------------------------------


def test_stale_block_in_later_piece_is_reported_and_stream_continues(
    lend: Callable[..., Lender], opened: Opened
) -> None:
    lender = lend()
    arena, kv = lender._arena, random_kv(0, 256, layout=BIG)
    with arena.writing(range(4)):
        copy_in(arena.data, range(4), kv)
    reader, generations = opened(lender.export, layout=BIG), arena.generations_of(range(4))
    assert_same(reader.read(range(4), generations, 5, 250), kv.slice(5, 250))
    arena.open([3])
    with pytest.raises(CacheStale, match="block 3 is at generation 3, its ticket says 2"):
        reader.read(range(4), generations, 0, 256)
    assert reader.alive()
    assert_same(reader.read(range(4), generations, 0, 192), kv.slice(0, 192))
    reader.close()


class InterruptedLender(Lender):
    """Writes a block between the copy and the second check."""

    def _bytes(self, blocks: Sequence[int]) -> memoryview:
        copy = super()._bytes(blocks)
        with self._arena.writing([blocks[-1]]):
            return copy


def test_block_written_during_owners_copy_is_stale(lend: Callable[..., Lender], opened: Opened) -> None:
    reader = opened(lend(kind=InterruptedLender).export, layout=BIG)
    with pytest.raises(CacheStale, match="block 2 is at generation 2, its ticket says 0"):
        reader.read([2], [0], 0, 64)


class CountingLender(Lender):
    num_copied = 0

    def _copy(self, blocks: Sequence[int], generations: Sequence[int]) -> memoryview:
        self.num_copied += len(blocks)
        return super()._copy(blocks, generations)


def test_stalled_reader_is_disconnected_after_one_piece(lend: Callable[..., Lender]) -> None:
    lender = lend(num_blocks=64, kind=CountingLender, stall_s=0.3)
    address = lender.export.address
    sock = socket.create_connection((str(address["address"]), int(address["port"])))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)
    channel = Channel(sock)
    channel.answer(SECRET)
    channel.receive(4096)
    channel.send(FrameKind.READ, pack_blocks(range(64), [0] * 64))
    until(lambda: lender.num_connections == 0)
    assert isinstance(lender, CountingLender) and 0 < lender.num_copied < 32  # as many as the kernel's buffers hold
    channel.close()


# -- bounds -----------------------------------------------------------------------------------------------------------


def test_connections_are_bounded_and_closed_when_idle(lend: Callable[..., Lender], opened: Opened) -> None:
    lender = lend(max_connections=2, idle_s=0.4)
    first, second = (opened(lender.export, layout=BIG) for _ in range(2))
    with pytest.raises(TransferFailed, match="closed the stream|broke"):
        opened(lender.export, layout=BIG)
    assert lender.num_connections == 2
    until(lambda: lender.num_connections == 0)
    assert not first.alive() and not second.alive()
    assert opened(lender.export, layout=BIG).alive()


def test_unauthenticated_connection_is_closed(lend: Callable[..., Lender]) -> None:
    lender = lend()
    address = lender.export.address
    with socket.create_connection((str(address["address"]), int(address["port"]))) as silent:
        silent.settimeout(10)
        began = time.monotonic()
        with contextlib.suppress(ConnectionError):
            while silent.recv(4096):
                pass
        assert 1.5 < time.monotonic() - began < 6


def test_closed_lender_leaves_no_thread_or_port(lend: Callable[..., Lender], opened: Opened) -> None:
    lender = lend()
    reader = opened(lender.export, layout=BIG)
    lender.close()
    assert lender.num_connections == 0
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kvrelay-lend")]
    with pytest.raises(CacheStale, match="the owner has closed"):
        reader.read([0], [0], 0, 4)
    with pytest.raises(CacheStale, match="nothing listens there"):
        opened(lender.export, layout=BIG)


@pytest.mark.parametrize("address", [{"address": 7}, {"port": "x"}, {"address": "no.such.host.invalid"}, {"port": -1}])
def test_unusable_address_is_rejected(owner: LocalOwner, address: dict[str, str | int], opened: Opened) -> None:
    export = owner.ticket(8).pool
    with pytest.raises(TransferFailed):
        opened(export.model_copy(update={"address": export.address | address}))
