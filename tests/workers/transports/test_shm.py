"""Shared memory between real processes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.workers.pool.support import LAYOUT, assert_same, random_kv
from tests.workers.transports.owner import LocalOwner, RemoteOwner
from workers.api.errors import CacheStale, TransferFailed
from workers.api.schemas import Ticket
from workers.pool.segment import Segment, reclaim_dead_segments
from workers.transports.base import Reader
from workers.transports.shm import ShmTransport

torch.set_num_threads(1)

BIG = LAYOUT.model_copy(update={"num_layers": 16, "block_tokens": 64, "head_dim": 64})  # a block is 1 MiB


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shm")


@pytest.fixture(scope="module")
def remote(directory: Path) -> Iterator[RemoteOwner]:
    """One process for all tests here, since importing torch is slow. The last test kills it."""
    owner = RemoteOwner("shm", num_blocks=8, layout=BIG, directory=directory)
    yield owner
    owner.kill()


def opened(ticket: Ticket, directory: Path) -> Reader:
    return ShmTransport(directory).open(ticket.pool, ticket.layout)


def is_mapped(name: str) -> bool:
    return name in Path("/proc/self/maps").read_text()


@pytest.mark.slow
def test_blocks_of_another_process_read_back(remote: RemoteOwner, directory: Path) -> None:
    ticket = remote.ticket(200, seed=4)
    reader = opened(ticket, directory)
    chunk = reader.read(ticket.blocks, ticket.generations, 0, 200)
    assert_same(chunk, random_kv(0, 200, seed=4, layout=BIG))
    reader.close()


@pytest.mark.slow
def test_torn_copy_is_never_returned(remote: RemoteOwner, directory: Path) -> None:
    """The owner keeps rewriting a block, filled with one number each time. Every copy holds one number only."""
    ticket = remote.ticket(64)
    reader, segment = opened(ticket, directory), Segment.attach(str(ticket.pool.address["name"]), directory)
    remote.rewrite_forever(ticket.blocks[0])
    whole, torn, end = 0, 0, time.monotonic() + 20
    while (whole < 50 or torn < 20) and time.monotonic() < end:
        try:
            generation = int(segment.generations[ticket.blocks[0]])
            chunk = reader.read(ticket.blocks[:1], [generation], 0, 64)
        except CacheStale:
            torn += 1
            continue
        numbers = {float(layer.min()) for layer in chunk.keys + chunk.values}
        numbers |= {float(layer.max()) for layer in chunk.keys + chunk.values}
        assert len(numbers) == 1
        whole += 1
    assert whole >= 50 and torn >= 20
    reader.close()
    segment.close()


@pytest.mark.slow
def test_frozen_owner_is_alive(remote: RemoteOwner, directory: Path) -> None:
    reader = opened(remote.ticket(10), directory)
    remote.process.send_signal(signal.SIGSTOP)
    try:
        assert reader.alive()
    finally:
        remote.process.send_signal(signal.SIGCONT)
    reader.close()


def test_close_unmaps_memory(tmp_path: Path) -> None:
    owner = LocalOwner("shm", directory=tmp_path)
    ticket = owner.ticket(8)
    name = str(ticket.pool.address["name"])
    reader = opened(ticket, tmp_path)
    owner.close()
    assert is_mapped(name)
    reader.close()
    assert not is_mapped(name)


def test_reader_mapping_is_read_only(tmp_path: Path) -> None:
    owner = LocalOwner("shm", directory=tmp_path)
    ticket = owner.ticket(8)
    reader = opened(ticket, tmp_path)
    name = str(ticket.pool.address["name"])
    modes = [line.split()[1] for line in Path("/proc/self/maps").read_text().splitlines() if name in line]
    assert sorted(modes) == ["r--s", "rw-s"]  # the reader's mapping and the owner's
    reader.close()
    owner.close()


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ({"host": "elsewhere"}, "the pool's memory is on host elsewhere; this worker's .* is on"),
        ({"name": "../../etc/passwd"}, "is not the name of a pool's file"),
        ({"name": 7}, "needs a string 'name'; got 7"),
        ({"name": f"kvrelay-{os.getuid()}-nobody-{'0' * 32}"}, "is gone"),
    ],
)
def test_unusable_address_is_rejected(address: dict[str, str | int], message: str, tmp_path: Path) -> None:
    owner = LocalOwner("shm", directory=tmp_path)
    ticket = owner.ticket(8)
    export = ticket.pool.model_copy(update={"address": ticket.pool.address | address})
    with pytest.raises((TransferFailed, CacheStale), match=message):
        ShmTransport(tmp_path).open(export, LAYOUT)
    owner.close()


@pytest.mark.slow
def test_killed_owners_blocks_are_readable_until_close(remote: RemoteOwner, directory: Path) -> None:
    ticket = remote.ticket(100, seed=5)
    reader = opened(ticket, directory)
    remote.kill()
    assert not reader.alive()
    assert reclaim_dead_segments(directory) == [ticket.pool.address["name"]]
    chunk = reader.read(ticket.blocks, ticket.generations, 0, 100)
    assert_same(chunk, random_kv(0, 100, seed=5, layout=BIG))
    reader.close()
    with pytest.raises(CacheStale, match="is gone"):
        opened(ticket, directory)
