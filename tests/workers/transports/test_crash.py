"""A reader that crashes with its source's memory open does no damage, and holds nothing beyond its lease."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from tests.workers.pool.support import SALT, assert_same, random_kv
from tests.workers.transports.owner import SECRET, LocalOwner
from workers.api.schemas import Ticket
from workers.pool.segment import SHM
from workers.transports.readers import Readers

pytestmark = pytest.mark.slow

torch.set_num_threads(1)


@pytest.fixture
def owners() -> Iterator[list[LocalOwner]]:
    owners = [LocalOwner("shm"), LocalOwner("tcp")]
    yield owners
    for owner in owners:
        owner.close()


@pytest.fixture
def crash() -> Iterator[Callable[[list[Ticket]], None]]:
    processes: list[subprocess.Popen[str]] = []

    def read_and_crash(tickets: list[Ticket]) -> None:
        command = [sys.executable, "-m", "tests.workers.transports.crashing_reader", SECRET]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        processes.append(process)
        assert process.stdin is not None and process.stdout is not None
        for ticket in tickets:
            process.stdin.write(ticket.model_dump_json() + "\n")
            process.stdin.flush()
            assert process.stdout.readline() == "read\n"
        process.kill()
        process.communicate()

    yield read_and_crash
    for process in processes:
        process.kill()
        process.communicate()


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.01)


def test_crashed_reader_leaves_pool_intact(owners: list[LocalOwner], crash: Callable[[list[Ticket]], None]) -> None:
    shm, tcp = owners
    entries = [owner.pool.store(range(16), random_kv(0, 16), SALT, ttl_s=600) for owner in owners]
    ttl_s = 120.0
    tickets = [owner.ticket_for(entry.cache_id, ttl_s) for owner, entry in zip(owners, entries, strict=True)]
    crash(tickets)
    assert tcp.lender is not None
    lender = tcp.lender
    until(lambda: lender.num_connections == 0)
    time.sleep(0.3)  # a resource tracker cleans up a little later
    assert (SHM / str(tickets[0].pool.address["name"])).exists()
    readers = Readers(SECRET)
    for owner, entry, ticket in zip(owners, entries, tickets, strict=True):
        reader = readers.get(ticket.pool.kind, ticket.pool, ticket.layout)
        assert_same(reader.read(ticket.blocks, ticket.generations, 0, 16), random_kv(0, 16))
        owner.pool.drop(entry.cache_id, SALT)
        assert owner.pool.stats.used_blocks == 4  # the crashed reader's lease
        owner.pool.sweep(time.time() + ttl_s + 1)
        assert owner.pool.stats.used_blocks == 0 and owner.pool.stats.lease_events["expired"] == 1
        with owner.pool.allocate(16):
            assert not owner.pool.arena.data.any()
    readers.close()
    shm.close()
    assert not (SHM / str(tickets[0].pool.address["name"])).exists()
