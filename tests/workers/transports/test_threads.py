from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from tests.workers.pool.support import LAYOUT, random_kv
from workers.api.errors import CacheStale, WorkerUnavailable
from workers.pool import new_epoch
from workers.pool.arena import HeapArena
from workers.pool.blocks import copy_in
from workers.transports.readers import PeerThreads, Readers


@pytest.fixture
def threads() -> Iterator[PeerThreads]:
    threads = PeerThreads(2)
    yield threads
    threads.close()


def test_what_waits_for_one_peer_waits_for_no_other(threads: PeerThreads) -> None:
    go_on = threading.Event()
    stuck = [threads.submit("silent", lambda: go_on.wait(10)) for _ in range(3)]
    assert threads.submit("other", lambda: 7).result(10) == 7
    assert not any(one.done() for one in stuck)
    assert stuck[2].cancel(), "a third one is not under way while two are"
    go_on.set()
    assert [one.result(10) for one in stuck[:2]] == [True, True]


def test_threads_that_nobody_needs_end(threads: PeerThreads) -> None:
    go_on = threading.Event()
    busy, idle = threads.submit("busy", lambda: go_on.wait(10)), threads.submit("idle", threading.current_thread)
    done = idle.result(10)
    threads.sweep()
    done.join(10)
    assert not done.is_alive() and not busy.done()
    assert threads.submit("idle", lambda: 7).result(10) == 7
    go_on.set()
    assert busy.result(10)


def test_nothing_begins_once_they_are_closed(threads: PeerThreads) -> None:
    threads.close()
    with pytest.raises(WorkerUnavailable, match="stopping"):
        threads.submit("peer", lambda: 7)


def test_a_pool_that_is_closed_while_it_is_read_keeps_no_other_waiting() -> None:
    """The read may be a step of a map."""
    gone, other = (HeapArena(LAYOUT, 2, new_epoch()) for _ in range(2))
    with gone.writing([0, 1]):
        copy_in(gone.data, [0, 1], random_kv(0, 8))
    readers, export = Readers(), gone.export()
    reader, beside = readers.get("gone", export, LAYOUT), readers.get("other", other.export(), LAYOUT)
    with pytest.raises(CacheStale), reader.reading([0, 1], [2, 2], 0, 8):
        gone.close()
        closing = threading.Thread(target=readers.sweep)
        closing.start()
        time.sleep(0.2)  # it has come to the reader that is in use
        found: list[object] = []
        looking = threading.Thread(target=lambda: found.append(readers.at_hand("other", other.export(), LAYOUT)))
        looking.start()
        looking.join(10)
        assert found == [beside] and closing.is_alive()
