"""The contract of every transport in the registry. A new one is tested by being registered."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from tests.workers.pool.support import LAYOUT, assert_same, random_kv
from tests.workers.transports.owner import SECRET, LocalOwner, RemoteOwner
from workers.api.errors import CacheStale, KvrelayError, TransferFailed
from workers.api.schemas import KVLayout, PoolExport, Ticket
from workers.pool.blocks import empty_cache
from workers.transports import TRANSPORTS, load_transport
from workers.transports.base import Reader
from workers.transports.inproc import InprocTransport
from workers.transports.readers import Readers

torch.set_num_threads(1)

# The owner is in this process, or in another one.
Owner = LocalOwner | RemoteOwner
OWNERS: dict[str, type[LocalOwner] | type[RemoteOwner]] = {
    "inproc": LocalOwner,
    "shm": LocalOwner,
    "cuda_ipc": RemoteOwner,
    "tcp": LocalOwner,
}
NAMES = [pytest.param(name, marks=pytest.mark.gpu) if "cuda" in name else name for name in TRANSPORTS]


@pytest.fixture(params=NAMES)
def owner(request: pytest.FixtureRequest) -> Iterator[Owner]:
    owner = OWNERS[request.param](request.param)
    yield owner
    owner.close()


@pytest.fixture
def readers() -> Iterator[Readers]:
    readers = Readers(SECRET)
    yield readers
    readers.close()


def opened(readers: Readers, ticket: Ticket) -> Reader:
    return readers.get("peer", ticket.pool, ticket.layout)


@pytest.mark.parametrize(("begin", "end"), [(0, 14), (0, 8), (4, 8), (3, 13), (13, 14), (5, 6)])
def test_read_returns_stored_tokens(owner: Owner, readers: Readers, begin: int, end: int) -> None:
    ticket = owner.ticket(14, seed=7)
    chunk = opened(readers, ticket).read(ticket.blocks, ticket.generations, begin, end)
    assert_same(chunk, random_kv(0, 14, seed=7).slice(begin, end))


def test_chunk_is_a_copy(owner: Owner, readers: Readers) -> None:
    ticket = owner.ticket(8, seed=1)
    chunk = opened(readers, ticket).read(ticket.blocks, ticket.generations, 0, 8)
    owner.free(ticket)
    owner.ticket(60, seed=2)
    assert_same(chunk, random_kv(0, 8, seed=1))


def test_reads_of_one_thread_reuse_its_buffer(owner: Owner, readers: Readers) -> None:
    ticket = owner.ticket(16, seed=1)
    reader, chunks = opened(readers, ticket), []

    def read(begin: int, end: int) -> None:
        chunks.append(reader.read(ticket.blocks, ticket.generations, begin, end))

    read(0, 8)
    other = threading.Thread(target=read, args=(8, 16))
    other.start()
    other.join()
    assert_same(chunks[0], random_kv(0, 16, seed=1).slice(0, 8))
    read(8, 14)
    assert chunks[2].keys[0].data_ptr() == chunks[0].keys[0].data_ptr() != chunks[1].keys[0].data_ptr()
    for chunk, (begin, end) in zip(chunks[1:], ((8, 16), (8, 14)), strict=True):
        assert_same(chunk, random_kv(0, 16, seed=1).slice(begin, end))


def test_pool_opened_meanwhile_by_another_thread_is_not_mistaken(
    readers: Readers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer restarts while two handoffs open its pool; blocks and generations are equal in both pools."""
    before, after = LocalOwner("inproc"), LocalOwner("inproc")
    old, new = before.ticket(8, seed=1), after.ticket(8, seed=2)
    original = InprocTransport.open

    def open_after_old(transport: InprocTransport, export: PoolExport, layout: KVLayout, **options: Any) -> Reader:
        if export == new.pool:
            opened(readers, old)
        return original(transport, export, layout, **options)

    monkeypatch.setattr(InprocTransport, "open", open_after_old)
    assert (old.blocks, old.generations) == (new.blocks, new.generations)
    assert_same(opened(readers, new).read(new.blocks, new.generations, 0, 8), random_kv(0, 8, seed=2))
    before.close()
    after.close()


def test_freed_cache_is_stale(owner: Owner, readers: Readers) -> None:
    ticket = owner.ticket(8)
    reader = opened(readers, ticket)
    owner.free(ticket)
    with pytest.raises(CacheStale, match="written or freed since"):
        reader.read(ticket.blocks, ticket.generations, 0, 8)


def test_reused_block_is_stale(owner: Owner, readers: Readers) -> None:
    old = owner.ticket(64, seed=1)
    reader = opened(readers, old)
    owner.free(old)
    new = owner.ticket(64, seed=2)
    assert set(new.blocks) == set(old.blocks)
    with pytest.raises(CacheStale):
        reader.read(old.blocks, old.generations, 0, 8)
    assert_same(reader.read(new.blocks, new.generations, 0, 8), random_kv(0, 64, seed=2).slice(0, 8))


def test_block_being_written_is_stale(owner: Owner, readers: Readers) -> None:
    ticket = owner.ticket(16)
    reader = opened(readers, ticket)
    owner.mark_writing(ticket.blocks[2])
    reader.read(ticket.blocks, ticket.generations, 0, 8)
    odd = [*ticket.generations[:2], ticket.generations[2] + 1, ticket.generations[3]]
    for generations in (ticket.generations, odd):
        with pytest.raises(CacheStale, match=f"block {ticket.blocks[2]} is at generation"):
            reader.read(ticket.blocks, generations, 0, 12)


def test_block_changed_during_read_is_stale_unless_copied(owner: Owner, readers: Readers) -> None:
    ticket = owner.ticket(16, seed=1)
    reader, copy = opened(readers, ticket), empty_cache(LAYOUT, 3, 13)
    stale = pytest.raises(CacheStale, match="written or freed since")
    with nullcontext() if reader.uses_network else stale:
        with reader.reading(ticket.blocks, ticket.generations, 3, 13) as span:
            owner.free(ticket)
            owner.ticket(60, seed=2)
            span.copy_out(copy)
    if reader.uses_network:
        assert_same(copy, random_kv(0, 16, seed=1).slice(3, 13))


def test_span_read_in_place_equals_stored_tokens(owner: Owner, readers: Readers) -> None:
    ticket, copy = owner.ticket(16, seed=1), empty_cache(LAYOUT, 3, 13)
    with opened(readers, ticket).reading(ticket.blocks, ticket.generations, 3, 13) as span:
        span.copy_out(copy)
    assert (span.start, span.num_tokens) == (3, 10)
    assert_same(copy, random_kv(0, 16, seed=1).slice(3, 13))


@pytest.mark.parametrize("block", [16, -1, 10**12])
def test_unknown_block_is_rejected(owner: Owner, readers: Readers, block: int) -> None:
    ticket = owner.ticket(8)
    with pytest.raises(TransferFailed, match=f"block {block} does not exist; this pool has blocks 0..15"):
        opened(readers, ticket).read([ticket.blocks[0], block], ticket.generations, 0, 4)


@pytest.mark.parametrize(("begin", "end"), [(0, 9), (-1, 4), (6, 5)])
def test_tokens_outside_cache_are_rejected(owner: Owner, readers: Readers, begin: int, end: int) -> None:
    ticket = owner.ticket(8)
    with pytest.raises(KvrelayError, match=rf"tokens \[{begin}, {end}\) are outside of 2 blocks"):
        opened(readers, ticket).read(ticket.blocks, ticket.generations, begin, end)


@pytest.mark.parametrize(
    "wrong",
    [
        {"layout": LAYOUT.model_copy(update={"num_layers": 4})},
        {"layout": LAYOUT.model_copy(update={"dtype": "float16"})},
        {"layout": LAYOUT.model_copy(update={"head_dim": 0})},
        {"layout": LAYOUT.model_copy(update={"dtype": "int4"})},
        {"num_blocks": 17},
    ],
    ids=str,
)
def test_pool_of_different_shape_is_not_opened(owner: Owner, readers: Readers, wrong: dict[str, object]) -> None:
    if wrong.get("layout") is not None and OWNERS[owner.ticket(1).pool.kind] is RemoteOwner:
        return  # no file holds the blocks' size; the handoff checks the layout against its mapper
    ticket = owner.ticket(8).model_copy(update={k: v for k, v in wrong.items() if k == "layout"})
    export = ticket.pool.model_copy(update={k: v for k, v in wrong.items() if k == "num_blocks"})
    with pytest.raises(KvrelayError):
        readers.get("peer", export, ticket.layout)
    assert readers.get_open("peer", export, ticket.layout) is None


def test_pool_of_different_epoch_is_stale(owner: Owner, readers: Readers) -> None:
    export = owner.ticket(8).pool.model_copy(update={"epoch": "0" * 32})
    with pytest.raises(CacheStale, match="epoch"):
        readers.get("peer", export, LAYOUT)


def test_closed_pool_is_stale_and_cannot_be_opened(owner: Owner, readers: Readers) -> None:
    ticket = owner.ticket(8)
    reader = opened(readers, ticket)
    assert reader.alive()
    owner.close()
    assert not reader.alive()
    with pytest.raises(CacheStale):
        reader.read(ticket.blocks, ticket.generations, 0, 8)
    with pytest.raises(CacheStale):
        load_transport(ticket.pool.kind, SECRET).open(ticket.pool, ticket.layout)


def test_closed_reader_raises_stale(owner: Owner, readers: Readers) -> None:
    ticket = owner.ticket(8)
    reader = opened(readers, ticket)
    reader.close()
    reader.close()
    with pytest.raises(CacheStale, match="this worker has closed"):
        reader.read(ticket.blocks, ticket.generations, 0, 8)


def test_pool_is_opened_once(owner: Owner, readers: Readers) -> None:
    first, second = owner.ticket(8), owner.ticket(12)
    assert opened(readers, first) is opened(readers, second)


def test_restart_of_peer_closes_old_reader(owner: Owner, readers: Readers) -> None:
    ticket = owner.ticket(8, seed=1)
    old = opened(readers, ticket)
    owner.close()
    restarted = OWNERS[ticket.pool.kind](ticket.pool.kind)
    again = restarted.ticket(8, seed=2)
    new = opened(readers, again)
    assert new is not old and readers.get_open("peer", again.pool, again.layout) is new
    assert_same(new.read(again.blocks, again.generations, 0, 8), random_kv(0, 8, seed=2))
    with pytest.raises(CacheStale, match="this worker has closed"):
        old.read(ticket.blocks, ticket.generations, 0, 8)
    restarted.close()


def test_sweep_closes_readers_of_dead_owners(owner: Owner, readers: Readers) -> None:
    ticket = owner.ticket(8)
    reader = opened(readers, ticket)
    readers.sweep()
    assert opened(readers, ticket) is reader
    owner.close()
    readers.sweep()
    with pytest.raises(CacheStale, match="this worker has closed"):
        reader.read(ticket.blocks, ticket.generations, 0, 8)


def test_export_and_ticket_round_trip_as_json(owner: Owner) -> None:
    ticket = owner.ticket(8)
    assert PoolExport.model_validate_json(ticket.pool.model_dump_json()) == ticket.pool
    assert Ticket.model_validate_json(ticket.model_dump_json()) == ticket
