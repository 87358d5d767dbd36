"""Transports to a source: the fastest that works, the next one if it fails, and an error that names all."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.workers.handoff.support import ForgingPeer, LocalPeer, Pair, make_pair, random_mapper, request, until
from tests.workers.pool.support import SALT, random_kv
from tests.workers.transports.owner import SECRET
from tests.workers.transports.tap import Tap
from workers.api.errors import CacheNotFound, CacheStale, DeadlineExceeded, KvrelayError, PoolFull, TransferFailed
from workers.api.schemas import PoolExport, TransferReply
from workers.pool.segment import SHM
from workers.transports.lender import Lender
from workers.transports.readers import THREADS_PER_KEY

NUM = 200


class Lending:
    """A pair whose source is in a file under /dev/shm and also lends over TCP. Records failed transports."""

    def __init__(self, pair: Pair):
        self.pair = pair
        self.failures: list[tuple[str, str]] = []
        self.lender = Lender(pair.source.arena, SECRET)
        self.lender.start()
        self.offer(self.lender.export)
        pair.adjust(transport_failed=lambda kind, error: self.failures.append((kind, error.code)))

    def offer(self, *streams: PoolExport) -> None:
        self.pair.local_peer = LocalPeer(self.pair.source, "small", streams)

    def remove_file(self) -> None:
        (SHM / str(self.pair.source.export().address["name"])).unlink()

    async def hand_over(self, *, deadline_ms: float = 20_000) -> TransferReply:
        entry = self.pair.source_cache(NUM)
        return await self.pair.handoffs.transfer(request(entry, deadline_ms=deadline_ms), peer=self.pair.local_peer)

    async def assert_fails(self, error: type[KvrelayError], match: str, *, deadline_ms: float = 20_000) -> None:
        """Check that the handoff fails with this error and leaves nothing."""
        with pytest.raises(error, match=match):
            await self.hand_over(deadline_ms=deadline_ms)
        await self.pair.handoffs.aclose()
        assert self.pair.num_used == 0 and self.pair.source.stats.num_leases == 0

    def check(self, reply: TransferReply) -> None:
        """Check that the cache is what the bundle makes of the source's tokens."""
        pool = self.pair.target.pool
        with pool.hold(reply.cache_id, SALT) as held:
            found = pool.gather(held.blocks, 4, NUM)
        expected = random_mapper().map(random_kv(0, NUM).slice(4, NUM))
        for mine, theirs in zip(found.keys + found.values, expected.keys + expected.values, strict=True):
            assert (mine - theirs).abs().max() < 1e-5


@pytest.fixture
def lending() -> Iterator[Lending]:
    lending = Lending(make_pair("shm"))
    yield lending
    lending.lender.close()
    lending.pair.close()


async def test_fastest_transport_is_used(lending: Lending) -> None:
    reply = await lending.hand_over()
    assert reply.transport == "shm" and lending.failures == []
    lending.check(reply)


async def test_missing_file_falls_back_to_stream(lending: Lending) -> None:
    lending.remove_file()
    reply = await lending.hand_over()
    assert reply.transport == "tcp" and lending.failures == [("shm", "cache_stale")]
    lending.check(reply)


async def test_transport_broken_during_handoff_falls_back(lending: Lending) -> None:
    """The chunk with changed bytes is read again; those before it are kept."""
    lending.remove_file()
    with Tap(lending.lender.export, flip={"to_reader": 40_000}) as tap:
        lending.offer(tap.export, lending.lender.export)
        reply = await lending.hand_over()
        assert len(tap.passed["to_reader"]) > 40_000
    assert lending.failures == [("shm", "cache_stale"), ("tcp", "transfer_corrupted")]
    lending.check(reply)


async def test_error_names_all_failed_transports(lending: Lending) -> None:
    lending.remove_file()
    with Tap(lending.lender.export, cut={"to_reader": 40_000}) as tap:
        lending.offer(tap.export)
        await lending.assert_fails(TransferFailed, r"stream.*\(before that, shm: the pool kvrelay-.* is gone")
    assert [kind for kind, _ in lending.failures] == ["shm", "tcp"]


async def test_stalled_transport_keeps_deadline_and_compute_thread(lending: Lending) -> None:
    lending.remove_file()
    with Tap(lending.lender.export, stop={"to_reader": 40_000}) as tap:
        lending.offer(tap.export)
        began = time.monotonic()
        failing = asyncio.create_task(lending.assert_fails(DeadlineExceeded, "deadline", deadline_ms=2_000))
        await until(lambda: len(tap.passed["to_reader"]) > 40_000, "the stall")
        await lending.pair.compute.run(lambda: None)
        assert time.monotonic() < began + 2.0
        await failing
        assert time.monotonic() < began + 6.0


async def test_stream_broken_by_another_handoff_is_reopened(lending: Lending) -> None:
    lending.remove_file()
    pair, peer = lending.pair, "small-0"
    ticket = pair.local_peer.ticket(pair.source.lease(pair.source_cache(8).cache_id, SALT, ttl_s=60))

    def break_stream(i: int) -> None:
        """Let a read's deadline pass on the same stream."""
        if i == 5:
            reader = pair.target.readers.get(peer, ticket.ways[1], ticket.layout)
            with pytest.raises(DeadlineExceeded):
                reader.read(ticket.blocks, ticket.generations, 0, 8, deadline=time.monotonic())

    pair.before_steps(break_stream)
    reply = await lending.hand_over()
    assert lending.failures == [("shm", "cache_stale")]
    lending.check(reply)


async def test_stale_cache_is_not_tried_on_other_transports(lending: Lending) -> None:
    pair = lending.pair
    pair.before_steps(lambda i: pair.source.arena.generations.__iadd__(2) if i == 4 else None)
    await lending.assert_fails(CacheStale, "written or freed since")
    assert lending.failures == []


# -- the source of a finished handoff ---------------------------------------------------------------------------------


@pytest.mark.parametrize("release", [True, False])
async def test_source_is_released_after_handoff_if_configured(pair: Pair, release: bool) -> None:
    released: list[bool] = []
    pair.adjust(release_source=release, source_released=lambda: released.append(True))
    entry = pair.source_cache(NUM)
    reply = await pair.handoffs.transfer(request(entry), peer=pair.local_peer)
    await pair.handoffs.aclose()
    stats = pair.source.stats
    assert (stats.used_blocks, stats.num_leases) == (0 if release else 50, 0) and len(released) == release
    assert pair.target.pool.get(reply.cache_id, SALT).num_tokens == NUM
    if release:
        with pytest.raises(CacheNotFound):
            await pair.handoffs.transfer(request(entry), peer=pair.local_peer)


async def test_source_of_failed_handoff_is_kept(pair: Pair) -> None:
    pair.adjust(release_source=True)
    entry = pair.source_cache(NUM)
    with pair.target.pool.allocate(64), pytest.raises(PoolFull):
        await pair.handoffs.transfer(request(entry), peer=pair.local_peer)
    await pair.handoffs.aclose()
    assert pair.source.get(entry.cache_id, SALT) == entry


async def test_blocks_of_released_source_in_use_are_kept(pair: Pair) -> None:
    pair.adjust(release_source=True)
    entry = pair.source_cache(NUM)
    with pair.source.hold(entry.cache_id, SALT) as held:
        await pair.handoffs.transfer(request(entry), peer=pair.local_peer)
        await pair.handoffs.aclose()
        found = pair.source.gather(held.blocks, 0, NUM)
        assert torch.equal(found.keys[0], random_kv(0, NUM).keys[0])
    assert pair.source.stats.used_blocks == 0


# -- a peer that does not answer ---------------------------------------------------------------------------------------


async def test_stuck_peer_does_not_delay_other_handoffs(lending: Lending) -> None:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))  # one thread for everything else
    pair, num_stuck = lending.pair, 2 * THREADS_PER_KEY
    long = pair.source_cache(NUM)
    with Tap(lending.lender.export, stop={"to_reader": 3_000}) as tap:
        stuck_peer = ForgingPeer(pair.local_peer, exports=[tap.export])
        stuck = [
            asyncio.create_task(
                pair.handoffs.transfer(
                    request(long, source_worker="silent", num_tokens=32, native_head=head, deadline_ms=20_000),
                    peer=stuck_peer,
                )
            )
            for head in range(num_stuck)
        ]
        await until(lambda: stuck_peer.num_leased == num_stuck and len(tap.passed["to_reader"]) >= 3_000, "the stall")
        reply = await pair.handoffs.transfer(request(long, num_tokens=64), peer=pair.local_peer)
        assert reply.transport == "shm" and not any(handoff.done() for handoff in stuck)
        await asyncio.wait_for(asyncio.to_thread(lambda: None), 10)
        for handoff in stuck:
            handoff.cancel()
        await asyncio.wait(stuck)


async def test_open_pool_needs_no_thread(lending: Lending) -> None:
    pair = lending.pair
    ticket = pair.local_peer.ticket(pair.source.lease(pair.source_cache(NUM).cache_id, SALT, ttl_s=60))
    pair.target.readers.get("small-0", ticket.pool, ticket.layout)
    pair.target.readers.threads.close()  # a request for one would raise
    await pair.handoffs.transfer(request(pair.source.peek(ticket.cache_id)), peer=pair.local_peer)
    assert lending.failures == []
