"""What only the stream between hosts has: proof of the secret, bytes that change on the way, waiting, bounds."""

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
from tests.workers.transports.tap import Tap, Way
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
BIG = LAYOUT.model_copy(update={"num_layers": 16, "block_tokens": 64, "head_dim": 64})  # a block of 1 MiB: a piece


@pytest.fixture
def owner() -> Iterator[LocalOwner]:
    owner = LocalOwner("tcp")
    yield owner
    owner.close()


@pytest.fixture
def lend() -> Iterator[Callable[..., Lender]]:
    """Lenders over plain memory, with other bounds."""
    lenders: list[Lender] = []

    def begin(num_blocks: int = 4, kind: type[Lender] = Lender, **bounds: Any) -> Lender:
        lenders.append(kind(HeapArena(BIG, num_blocks, new_epoch()), SECRET, **bounds))
        lenders[-1].start()
        return lenders[-1]

    yield begin
    for lender in lenders:
        lender.close()


Opened = Callable[..., Reader]


@pytest.fixture
def opened() -> Iterator[Opened]:
    readers: list[Reader] = []

    def begin(export: PoolExport, secret: str = SECRET, layout: KVLayout = LAYOUT) -> Reader:
        readers.append(TcpTransport(secret).open(export, layout))
        return readers[-1]

    yield begin
    for reader in readers:
        reader.close()


def read(reader: Reader, ticket: Ticket, *, deadline_s: float = 20.0) -> KVCache:
    return reader.read(ticket.blocks, ticket.generations, 0, 14, deadline=time.monotonic() + deadline_s)


def until(true: Callable[[], bool], timeout_s: float = 10.0) -> None:
    end = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


# -- bytes that change ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("way", "at"),
    [
        ("to_reader", GREETING + 9),  # the welcome
        ("to_reader", WELCOME),  # blocks: what kind of frame it is
        ("to_reader", WELCOME + 8 + 1000),  # their content
        ("to_reader", WELCOME + 8 + 4 * block_bytes(LAYOUT) + 3),  # their code
    ],
)
def test_a_changed_byte_is_found(owner: LocalOwner, way: Way, at: int, opened: Opened) -> None:
    ticket = owner.ticket(14)
    with Tap(ticket.pool, flip={way: at}) as tap:
        with pytest.raises(TransferCorrupted, match="is not what was sent"):
            read(opened(tap.export), ticket)
        assert len(tap.passed[way]) > at
    assert_same(read(opened(ticket.pool), ticket), random_kv(0, 14))


def test_a_changed_request_is_not_answered(owner: LocalOwner, opened: Opened) -> None:
    ticket = owner.ticket(14)
    with Tap(ticket.pool, flip={"to_owner": GREETING + 32 + 8}) as tap:
        reader = opened(tap.export)
        with pytest.raises(TransferFailed, match="ended"):
            read(reader, ticket)
        assert len(tap.passed["to_reader"]) == WELCOME and not reader.alive()


# -- who may read -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("secret", ["another secret", SECRET + "x"])
def test_a_reader_without_the_secret_learns_nothing(owner: LocalOwner, secret: str, opened: Opened) -> None:
    ticket = owner.ticket(14)
    with Tap(ticket.pool) as tap, pytest.raises(TransferFailed, match="ended"):
        opened(tap.export, secret)
    assert len(tap.passed["to_reader"]) == GREETING


def test_an_owner_without_the_secret_is_not_believed(opened: Opened) -> None:
    impostor = HeapArena(LAYOUT, 16, new_epoch())
    lender = Deaf(impostor, "what an impostor knows")
    lender.start()
    with pytest.raises(TransferCorrupted):
        opened(lender.export)
    lender.close()


class Deaf(Lender):
    """Takes any proof."""

    def _welcome(self, channel: Channel) -> None:
        channel._send(b"KVRELAY-TCP/1\0\0\0" + bytes(32))
        channel._receive_exactly(GREETING + 32)
        channel._agree("what an impostor knows", bytes(64), send=b"owner", receive=b"reader")
        channel.send(FrameKind.WELCOME, bytes(72))


def test_nothing_travels_without_a_secret(owner: LocalOwner, opened: Opened) -> None:
    with pytest.raises(TransferFailed, match="needs the cluster secret"):
        opened(owner.ticket(8).pool, "")


def test_the_secret_stays_at_home_and_what_was_said_cannot_be_said_again(owner: LocalOwner, opened: Opened) -> None:
    ticket = owner.ticket(14)
    with Tap(ticket.pool) as tap:
        read(opened(tap.export), ticket)
    said = bytes(tap.passed["to_owner"])
    assert SECRET.encode() not in said + bytes(tap.passed["to_reader"])
    address = ticket.pool.address
    with socket.create_connection((str(address["address"]), int(address["port"]))) as again:
        again.settimeout(10)
        heard = b""
        with contextlib.suppress(ConnectionError):
            again.sendall(said)
            while more := again.recv(4096):
                heard += more
    assert len(heard) == GREETING


# -- waiting ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [10, WELCOME - 1], ids=["greeting", "welcome"])
def test_opening_ends_at_its_deadline(owner: LocalOwner, at: int) -> None:
    with Tap(owner.ticket(8).pool, stop={"to_reader": at}) as tap:
        began = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            TcpTransport(SECRET).open(tap.export, LAYOUT, deadline=began + 0.2)
        assert time.monotonic() - began < 1.5


def test_a_read_ends_at_its_deadline_and_another_does_not_wait_for_it(owner: LocalOwner, opened: Opened) -> None:
    ticket = owner.ticket(14)
    with Tap(ticket.pool, stop={"to_reader": WELCOME + 100}) as tap:
        reader, outcomes = opened(tap.export), []

        def late(deadline_s: float) -> None:
            began = time.monotonic()
            with pytest.raises(DeadlineExceeded):
                read(reader, ticket, deadline_s=deadline_s)
            outcomes.append(time.monotonic() - began)

        first = threading.Thread(target=late, args=(0.6,))
        first.start()
        until(lambda: len(tap.passed["to_owner"]) > GREETING + 32)
        late(0.1)
        assert reader.alive()  # a read is under way
        first.join()
        assert len(outcomes) == 2 and outcomes[0] < 0.5 and outcomes[1] < 2.0
        assert not reader.alive()


def test_a_read_takes_nothing_of_one_that_was_given_up(owner: LocalOwner, opened: Opened) -> None:
    """The answer to the first comes when the second asks."""
    one, other = owner.ticket(14, seed=1), owner.ticket(14, seed=2)
    with Tap(one.pool, wait={"to_reader": WELCOME}) as tap:
        reader = opened(tap.export)
        with pytest.raises(DeadlineExceeded):
            read(reader, one, deadline_s=0.3)
        tap.gate.set()
        with pytest.raises(TransferFailed, match="broke off in another read"):
            read(reader, other)


def test_closing_ends_a_read_that_waits(owner: LocalOwner, opened: Opened) -> None:
    ticket = owner.ticket(14)
    with Tap(ticket.pool, stop={"to_reader": WELCOME}) as tap:
        reader, errors = opened(tap.export), []

        def waits() -> None:
            try:
                read(reader, ticket)
            except KvrelayError as error:
                errors.append(error)

        thread = threading.Thread(target=waits)
        thread.start()
        until(lambda: len(tap.passed["to_owner"]) > GREETING + 32)
        reader.close()
        thread.join(2)
        assert [type(error) for error in errors] == [TransferFailed]


def test_a_stream_that_was_cut_is_not_used_again(owner: LocalOwner, opened: Opened) -> None:
    ticket = owner.ticket(14)
    with Tap(ticket.pool, cut={"to_reader": WELCOME + 500}) as tap:
        reader = opened(tap.export)
        with pytest.raises(TransferFailed):
            read(reader, ticket)
        assert not reader.alive()


# -- pieces -----------------------------------------------------------------------------------------------------------


def test_a_block_written_behind_the_first_pieces_is_found_and_the_stream_goes_on(
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


class Interrupted(Lender):
    """Something is written between the copy and the second look."""

    def _bytes(self, blocks: Sequence[int]) -> memoryview:
        copy = super()._bytes(blocks)
        with self._arena.writing([blocks[-1]]):
            return copy


def test_a_block_written_during_the_owners_copy_makes_it_stale(lend: Callable[..., Lender], opened: Opened) -> None:
    reader = opened(lend(kind=Interrupted).export, layout=BIG)
    with pytest.raises(CacheStale, match="block 2 is at generation 2, its ticket says 0"):
        reader.read([2], [0], 0, 64)


class Counting(Lender):
    num_copied = 0

    def _copy(self, blocks: Sequence[int], generations: Sequence[int]) -> memoryview:
        self.num_copied += len(blocks)
        return super()._copy(blocks, generations)


def test_a_reader_that_takes_nothing_costs_one_piece_and_is_let_go(lend: Callable[..., Lender]) -> None:
    lender = lend(num_blocks=64, kind=Counting, stall_s=0.3)
    address = lender.export.address
    sock = socket.create_connection((str(address["address"]), int(address["port"])))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)
    channel = Channel(sock)
    channel.answer(SECRET)
    channel.receive(4096)
    channel.send(FrameKind.READ, pack_blocks(range(64), [0] * 64))
    until(lambda: lender.num_connections == 0)
    assert isinstance(lender, Counting) and 0 < lender.num_copied < 32  # what the kernel's buffers took
    channel.close()


# -- bounds -----------------------------------------------------------------------------------------------------------


def test_connections_are_bounded_and_idle_ones_end(lend: Callable[..., Lender], opened: Opened) -> None:
    lender = lend(max_connections=2, idle_s=0.4)
    first, second = (opened(lender.export, layout=BIG) for _ in range(2))
    with pytest.raises(TransferFailed, match="ended|broke off"):
        opened(lender.export, layout=BIG)
    assert lender.num_connections == 2
    until(lambda: lender.num_connections == 0)
    assert not first.alive() and not second.alive()
    assert opened(lender.export, layout=BIG).alive()


def test_who_does_not_prove_himself_is_let_go(lend: Callable[..., Lender]) -> None:
    lender = lend()
    address = lender.export.address
    with socket.create_connection((str(address["address"]), int(address["port"]))) as silent:
        silent.settimeout(10)
        began = time.monotonic()
        with contextlib.suppress(ConnectionError):
            while silent.recv(4096):
                pass
        assert 1.5 < time.monotonic() - began < 6


def test_nothing_of_a_closed_lender_is_left(lend: Callable[..., Lender], opened: Opened) -> None:
    lender = lend()
    reader = opened(lender.export, layout=BIG)
    lender.close()
    assert lender.num_connections == 0
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kvrelay-lend")]
    with pytest.raises(CacheStale, match="closed by its owner"):
        reader.read([0], [0], 0, 4)
    with pytest.raises(CacheStale, match="nobody listens there"):
        opened(lender.export, layout=BIG)


@pytest.mark.parametrize("address", [{"address": 7}, {"port": "x"}, {"address": "no.such.host.invalid"}, {"port": -1}])
def test_an_address_that_leads_nowhere_is_refused(
    owner: LocalOwner, address: dict[str, str | int], opened: Opened
) -> None:
    export = owner.ticket(8).pool
    with pytest.raises(TransferFailed):
        opened(export.model_copy(update={"address": export.address | address}))
