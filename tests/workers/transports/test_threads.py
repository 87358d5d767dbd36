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


def test_stuck_peer_does_not_delay_other_peers(threads: PeerThreads) -> None:
    released = threading.Event()
    stuck = [threads.submit("silent", lambda: released.wait(10)) for _ in range(3)]
    assert threads.submit("other", lambda: 7).result(10) == 7
    assert not any(work.done() for work in stuck)
    assert stuck[2].cancel(), "a third one does not run while two do"
    released.set()
    assert [work.result(10) for work in stuck[:2]] == [True, True]


def test_sweep_ends_idle_threads(threads: PeerThreads) -> None:
    released = threading.Event()
    busy, idle = threads.submit("busy", lambda: released.wait(10)), threads.submit("idle", threading.current_thread)
    done = idle.result(10)
    threads.sweep()
    done.join(10)
    assert not done.is_alive() and not busy.done()
    assert threads.submit("idle", lambda: 7).result(10) == 7
    released.set()
    assert busy.result(10)


def test_submit_after_close_raises(threads: PeerThreads) -> None:
    threads.close()
    with pytest.raises(WorkerUnavailable, match="stopping"):
        threads.submit("peer", lambda: 7)


def test_closing_reader_in_use_does_not_block_others() -> None:
    """The read may be a step of a mapping."""
    closed, other = (HeapArena(LAYOUT, 2, new_epoch()) for _ in range(2))
    with closed.writing([0, 1]):
        copy_in(closed.data, [0, 1], random_kv(0, 8))
    readers, export = Readers(), closed.export()
    reader, other_reader = readers.get("closed", export, LAYOUT), readers.get("other", other.export(), LAYOUT)
    with pytest.raises(CacheStale), reader.reading([0, 1], [2, 2], 0, 8):
        closed.close()
        closing = threading.Thread(target=readers.sweep)
        closing.start()
        time.sleep(0.2)  # the sweep has reached the reader in use
        found: list[object] = []
        asking = threading.Thread(target=lambda: found.append(readers.get_open("other", other.export(), LAYOUT)))
        asking.start()
        asking.join(10)
        assert found == [other_reader] and closing.is_alive()
