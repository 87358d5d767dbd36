"""Ways to a source: the fastest that works, the next where it fails, and an error that names them all."""

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
from workers.transports.readers import THREADS_EACH

NUM = 200


class Lending:
    """A pair whose source is in a file under /dev/shm and lends over TCP as well; what failed is noted."""

    def __init__(self, pair: Pair):
        self.pair = pair
        self.failures: list[tuple[str, str]] = []
        self.lender = Lender(pair.source.arena, SECRET)
        self.lender.start()
        self.offer(self.lender.export)
        pair.adjust(transport_failed=lambda kind, error: self.failures.append((kind, error.code)))

    def offer(self, *streams: PoolExport) -> None:
        self.pair.office = LocalPeer(self.pair.source, "small", streams)

    def remove_file(self) -> None:
        (SHM / str(self.pair.source.export().address["name"])).unlink()

    async def hand_over(self, *, deadline_ms: float = 20_000) -> TransferReply:
        entry = self.pair.source_cache(NUM)
        return await self.pair.handoffs.transfer(request(entry, deadline_ms=deadline_ms), peer=self.pair.office)

    async def failing(self, error: type[KvrelayError], match: str, *, deadline_ms: float = 20_000) -> None:
        """The handoff fails so, and nothing of it stays."""
        with pytest.raises(error, match=match):
            await self.hand_over(deadline_ms=deadline_ms)
        await self.pair.handoffs.aclose()
        assert self.pair.num_used == 0 and self.pair.source.stats.num_leases == 0

    def check(self, reply: TransferReply) -> None:
        """What was handed over is what the bundle makes of the source's tokens."""
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


async def test_the_fastest_way_is_taken(lending: Lending) -> None:
    reply = await lending.hand_over()
    assert reply.transport == "shm" and lending.failures == []
    lending.check(reply)


async def test_without_its_file_a_pool_is_read_over_its_stream(lending: Lending) -> None:
    lending.remove_file()
    reply = await lending.hand_over()
    assert reply.transport == "tcp" and lending.failures == [("shm", "cache_stale")]
    lending.check(reply)


async def test_a_way_that_breaks_in_the_middle_makes_room_for_the_next(lending: Lending) -> None:
    """The chunk whose bytes were changed is read again; those before it stand."""
    lending.remove_file()
    with Tap(lending.lender.export, flip={"to_reader": 40_000}) as tap:
        lending.offer(tap.export, lending.lender.export)
        reply = await lending.hand_over()
        assert len(tap.passed["to_reader"]) > 40_000
    assert lending.failures == [("shm", "cache_stale"), ("tcp", "transfer_corrupted")]
    lending.check(reply)


async def test_when_all_fail_the_error_names_them(lending: Lending) -> None:
    lending.remove_file()
    with Tap(lending.lender.export, cut={"to_reader": 40_000}) as tap:
        lending.offer(tap.export)
        await lending.failing(TransferFailed, r"stream.*\(before that, shm: the pool kvrelay-.* is gone")
    assert [kind for kind, _ in lending.failures] == ["shm", "tcp"]


async def test_a_stalled_way_keeps_to_the_deadline_and_nobody_elses_compute(lending: Lending) -> None:
    lending.remove_file()
    with Tap(lending.lender.export, stop={"to_reader": 40_000}) as tap:
        lending.offer(tap.export)
        began = time.monotonic()
        failing = asyncio.create_task(lending.failing(DeadlineExceeded, "deadline", deadline_ms=2_000))
        await until(lambda: len(tap.passed["to_reader"]) > 40_000, "the stall")
        await lending.pair.compute.run(lambda: None)
        assert time.monotonic() < began + 2.0
        await failing
        assert time.monotonic() < began + 6.0


async def test_a_stream_that_another_handoff_gave_up_is_opened_anew(lending: Lending) -> None:
    lending.remove_file()
    pair, peer = lending.pair, "small-0"
    ticket = pair.office.ticket(pair.source.lease(pair.source_cache(8).cache_id, SALT, ttl_s=60))

    def give_up(i: int) -> None:
        """Another one's deadline passes while it reads over the same stream."""
        if i == 5:
            reader = pair.target.readers.get(peer, ticket.ways[1], ticket.layout)
            with pytest.raises(DeadlineExceeded):
                reader.read(ticket.blocks, ticket.generations, 0, 8, deadline=time.monotonic())

    pair.before_steps(give_up)
    reply = await lending.hand_over()
    assert lending.failures == [("shm", "cache_stale")]
    lending.check(reply)


async def test_a_cache_that_was_written_since_is_looked_for_nowhere_else(lending: Lending) -> None:
    pair = lending.pair
    pair.before_steps(lambda i: pair.source.arena.generations.__iadd__(2) if i == 4 else None)
    await lending.failing(CacheStale, "written or freed since")
    assert lending.failures == []


# -- the source of a finished handoff ---------------------------------------------------------------------------------


@pytest.mark.parametrize("release", [True, False])
async def test_a_source_that_was_handed_over_can_be_released_at_once(pair: Pair, release: bool) -> None:
    released: list[bool] = []
    pair.adjust(release_source=release, source_released=lambda: released.append(True))
    entry = pair.source_cache(NUM)
    reply = await pair.handoffs.transfer(request(entry), peer=pair.office)
    await pair.handoffs.aclose()
    stats = pair.source.stats
    assert (stats.used_blocks, stats.num_leases) == (0 if release else 50, 0) and len(released) == release
    assert pair.target.pool.get(reply.cache_id, SALT).num_tokens == NUM
    if release:
        with pytest.raises(CacheNotFound):
            await pair.handoffs.transfer(request(entry), peer=pair.office)


async def test_a_source_whose_handoff_failed_is_kept(pair: Pair) -> None:
    pair.adjust(release_source=True)
    entry = pair.source_cache(NUM)
    with pair.target.pool.allocate(64), pytest.raises(PoolFull):
        await pair.handoffs.transfer(request(entry), peer=pair.office)
    await pair.handoffs.aclose()
    assert pair.source.get(entry.cache_id, SALT) == entry


async def test_what_others_use_of_a_released_source_stays(pair: Pair) -> None:
    pair.adjust(release_source=True)
    entry = pair.source_cache(NUM)
    with pair.source.hold(entry.cache_id, SALT) as held:
        await pair.handoffs.transfer(request(entry), peer=pair.office)
        await pair.handoffs.aclose()
        found = pair.source.gather(held.blocks, 0, NUM)
        assert torch.equal(found.keys[0], random_kv(0, NUM).keys[0])
    assert pair.source.stats.used_blocks == 0


# -- a peer that does not answer ---------------------------------------------------------------------------------------


async def test_a_peer_that_does_not_answer_holds_up_nobody_elses_handoff(lending: Lending) -> None:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))  # a thread for all that has none of its own
    pair, num_stuck = lending.pair, 2 * THREADS_EACH
    long = pair.source_cache(NUM)
    with Tap(lending.lender.export, stop={"to_reader": 3_000}) as tap:
        silent = ForgingPeer(pair.office, exports=[tap.export])
        stuck = [
            asyncio.create_task(
                pair.handoffs.transfer(
                    request(long, source_worker="silent", num_tokens=32, native_head=head, deadline_ms=20_000),
                    peer=silent,
                )
            )
            for head in range(num_stuck)
        ]
        await until(lambda: silent.num_leased == num_stuck and len(tap.passed["to_reader"]) >= 3_000, "the stall")
        reply = await pair.handoffs.transfer(request(long, num_tokens=64), peer=pair.office)
        assert reply.transport == "shm" and not any(handoff.done() for handoff in stuck)
        await asyncio.wait_for(asyncio.to_thread(lambda: None), 10)
        for handoff in stuck:
            handoff.cancel()
        await asyncio.wait(stuck)


async def test_a_pool_that_is_open_takes_no_thread(lending: Lending) -> None:
    pair = lending.pair
    ticket = pair.office.ticket(pair.source.lease(pair.source_cache(NUM).cache_id, SALT, ttl_s=60))
    pair.target.readers.get("small-0", ticket.pool, ticket.layout)
    pair.target.readers.threads.close()  # whoever wants one now is refused
    await pair.handoffs.transfer(request(pair.source.peek(ticket.cache_id)), peer=pair.office)
    assert lending.failures == []
