"""A handoff that fails names the cause, gives nothing wrong, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from mappers.cache import KVCache
from tests.workers.handoff.support import (
    SOURCE,
    SOURCE_LAYOUT,
    TARGET,
    BrokenMapper,
    ForgingPeer,
    FrozenPeer,
    HeldMapper,
    Pair,
    make_pair,
    make_pool,
    native_kv,
    random_mapper,
    request,
    until,
)
from tests.workers.pool.support import OTHER_SALT, SALT, ManualClock
from workers.api.errors import (
    BundleUnusable,
    CacheMismatch,
    CacheNotFound,
    CacheStale,
    DeadlineExceeded,
    InvalidRequest,
    KvrelayError,
    Overloaded,
    PoolFull,
    TransferFailed,
    WorkerUnavailable,
)
from workers.api.schemas import LeaseRequest
from workers.digest import token_digest
from workers.handoff import HandoffResult
from workers.pool.entries import CacheEntry, Span


async def refused(
    pair: Pair, error: type[KvrelayError], match: str, *, entry: CacheEntry, peer: Any = None, **changes: Any
) -> None:
    """The handoff fails so, and afterwards all blocks and leases are back."""
    with pytest.raises(error, match=match):
        await pair.handoffs.transfer(request(entry, **changes), peer=peer or pair.office)
    await nothing_left(pair)


async def nothing_left(pair: Pair) -> None:
    await pair.handoffs.aclose()
    assert pair.num_used == 0
    assert pair.target.pool.stats.num_caches == 0
    assert pair.source.stats.num_leases == 0


# -- what is asked for ------------------------------------------------------------------------------------------------


async def test_an_unknown_cache(pair: Pair) -> None:
    await refused(pair, CacheNotFound, "no cache kvc-0", entry=pair.source_cache(20), cache_id="kvc-" + "0" * 32)


async def test_an_expired_cache() -> None:
    clock = ManualClock()
    pair = make_pair(clock=clock)
    entry = pair.source_cache(20, ttl_s=5)
    clock.now += 6
    await refused(pair, CacheNotFound, "no cache", entry=entry)
    pair.close()


async def test_another_tenants_cache(pair: Pair) -> None:
    await refused(pair, CacheMismatch, "another tenant", entry=pair.source_cache(20), tenant_salt=OTHER_SALT)


async def test_a_source_model_or_target_model_of_another_name(pair: Pair) -> None:
    entry = pair.source_cache(20)
    await refused(pair, CacheMismatch, "of model small, not tiny", entry=entry, source_model="tiny")
    await refused(pair, InvalidRequest, "unknown model 'huge'; this worker has large", entry=entry, target_model="huge")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"num_tokens": 21}, "num_tokens 21 asked for; kvc-.* has 20"),
        ({"native_head": 20}, "native_head 20 leaves none of 20 tokens to map"),
        ({"native_head": 9, "num_tokens": 8}, "native_head 9 leaves none of 8"),
    ],
)
async def test_more_tokens_than_there_are(pair: Pair, changes: dict[str, int], match: str) -> None:
    await refused(pair, InvalidRequest, match, entry=pair.source_cache(20), **changes)


async def test_a_cache_that_is_mapped_itself(pair: Pair) -> None:
    with pair.source.allocate(5) as fresh:
        entry = pair.source.put(
            fresh.blocks, range(20), SALT, ttl_s=60, provenance="mapped:abc", mapped=Span(0, 20)
        )
    await refused(pair, CacheMismatch, "is mapped:abc and is not mapped again: errors of two maps add up", entry=entry)


# -- what the ticket says ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("forged", "error", "match"),
    [
        ({"cache_id": "kvc-" + "1" * 32}, TransferFailed, "the ticket is for kvc-1"),
        ({"digest": "0" * 64}, CacheMismatch, "digest"),
        ({"token_ids": [9, *range(1, 20)]}, CacheMismatch, "digest"),
        ({"digest": token_digest(range(20), OTHER_SALT)}, CacheMismatch, "not that of its tokens under this tenant's"),
        ({"token_ids": list(range(19))}, TransferFailed, "19 token ids; 20 tokens take 5 blocks"),
        ({"blocks": [0, 1, 2, 3]}, TransferFailed, "the ticket has 4 blocks"),
        ({"generations": [2]}, TransferFailed, "1 generations"),
        ({"blocks": [0, 1, 2, 3, 99]}, TransferFailed, "block 99 does not exist; this pool has blocks 0..63"),
        ({"blocks": [0, 1, 2, 3, -1]}, TransferFailed, "block -1 does not exist"),
        ({"generations": [2, 2, 2, 2, 4]}, CacheStale, "at generation 2, its ticket says 4"),
        ({"generations": [3, 3, 3, 3, 3]}, CacheStale, "written or freed"),
        ({"fingerprint": "e" * 64}, BundleUnusable, "no usable bundle 'auto' from weights eeeeeeeeeeee; .* from 5151"),
        ({"layout": SOURCE_LAYOUT.model_copy(update={"num_layers": 2})}, CacheMismatch, "num_layers=2"),
        ({"layout": SOURCE_LAYOUT.model_copy(update={"num_kv_heads": 4})}, CacheMismatch, "num_kv_heads=4"),
        ({"layout": SOURCE_LAYOUT.model_copy(update={"head_dim": 16})}, CacheMismatch, "head_dim=16"),
        ({"layout": SOURCE_LAYOUT.model_copy(update={"dtype": "float16"})}, TransferFailed, "dtype='float16'"),
        ({"layout": SOURCE_LAYOUT.model_copy(update={"dtype": "int3"})}, TransferFailed, "dtype='int3'"),
        ({"layout": SOURCE_LAYOUT.model_copy(update={"block_tokens": 0})}, TransferFailed, "20 tokens take 20 blocks"),
    ],
    ids=lambda value: str(next(iter(value))) if isinstance(value, dict) else "",
)
async def test_a_ticket_that_does_not_fit(
    pair: Pair, forged: dict[str, Any], error: type[KvrelayError], match: str
) -> None:
    peer = ForgingPeer(pair.office, **forged)
    entry = pair.source_cache(20)
    with pytest.raises(error, match=match):
        await pair.handoffs.transfer(request(entry), peer=peer)
    await pair.handoffs.aclose()
    assert peer.num_released == 1
    assert pair.num_used == 0


async def test_a_layout_that_lies_is_caught_by_the_file_itself() -> None:
    pair = make_pair("shm")
    peer = ForgingPeer(pair.office, layout=SOURCE_LAYOUT.model_copy(update={"dtype": "float16"}))
    await refused(pair, TransferFailed, "the pool has 64 blocks of 1536 bytes", entry=pair.source_cache(20), peer=peer)
    pair.close()


async def test_a_transport_that_this_worker_does_not_read(pair: Pair) -> None:
    pair.adjust(site=pair.target.site.model_copy(update={"transports": ["shm"]}))
    await refused(
        pair, TransferFailed, "the source offers inproc; this worker reads shm", entry=pair.source_cache(20)
    )


async def test_an_epoch_that_has_passed() -> None:
    """The ticket is of a worker that has restarted since."""
    pair = make_pair("shm")
    entry = pair.source_cache(20)
    ticket = await pair.office.lease(entry.cache_id, LeaseRequest(ttl_s=60, tenant_salt=SALT), timeout_s=1)
    pair.source.close()
    restarted = make_pool(SOURCE_LAYOUT, SOURCE, kind="shm")
    pair.source = restarted
    pair.office = type(pair.office)(restarted, "small")
    again = pair.source_cache(20)
    old = ticket.pool
    for export in (old, restarted.export().model_copy(update={"epoch": old.epoch})):
        peer = ForgingPeer(pair.office, pool=export, exports=[export])
        await refused(pair, CacheStale, "is gone|is of epoch", entry=again, peer=peer)
    pair.close()


# -- mappers ----------------------------------------------------------------------------------------------------------


async def test_no_bundle_or_none_for_these_weights(pair: Pair) -> None:
    entry = pair.source_cache(20)
    for mappers in ([], [random_mapper(target="8b" * 32)], [random_mapper(source="8b" * 32)]):
        pair.adjust(mappers=lambda mappers=mappers: mappers)
        await refused(pair, BundleUnusable, "no usable bundle 'auto' from weights 515151515151", entry=entry)


async def test_what_nobody_foresaw_is_counted_too(pair: Pair) -> None:
    outcomes: list[HandoffResult] = []
    pair.adjust(mappers=lambda: [BrokenMapper()], observe=outcomes.append)
    with pytest.raises(RuntimeError, match="out of memory"):
        await pair.handoffs.transfer(request(pair.source_cache(20)), peer=pair.office)
    assert [outcome.result for outcome in outcomes] == ["internal_error"]
    await nothing_left(pair)


@pytest.mark.parametrize(("model_len", "rope_limit", "limit"), [(90, None, 90), (None, 80, 80), (90, 80, 80)])
@pytest.mark.parametrize("role", ["source_rope", "target_rope"])
async def test_more_tokens_than_there_are_positions(
    pair: Pair, model_len: int | None, rope_limit: int | None, limit: int, role: str
) -> None:
    mapper = random_mapper()
    getattr(mapper, role).limit = rope_limit
    pair.adjust(mappers=lambda: [mapper], max_tokens=model_len)
    entry = pair.source_cache(100)
    for asked, num_tokens in ((None, 100), (limit + 1, limit + 1)):
        says = f"{num_tokens} tokens are to be handed over; .* {mapper.bundle_id} take at most {limit}$"
        await refused(pair, InvalidRequest, says, entry=entry, num_tokens=asked)
    assert (await pair.handoffs.transfer(request(entry, num_tokens=limit), peer=pair.office)).num_tokens == limit


async def test_a_bundle_is_taken_by_its_id(pair: Pair) -> None:
    first, second = random_mapper(1), random_mapper(2)
    pair.adjust(mappers=lambda: [first, second])
    entry = pair.source_cache(20)
    for mapper in (first, second):
        reply = await pair.handoffs.transfer(request(entry, mapper=mapper.bundle_id), peer=pair.office)
        assert reply.mapper == mapper.bundle_id
    with pytest.raises(BundleUnusable, match=f"'feed'.*this worker uses: {first.bundle_id} from 515151515151, "):
        await pair.handoffs.transfer(request(entry, mapper="feed"), peer=pair.office)


async def test_a_bundle_that_is_switched_off_meanwhile_is_used_no_more(pair: Pair) -> None:
    usable = [random_mapper()]
    pair.adjust(mappers=lambda: usable)
    entry = pair.source_cache(20)
    await pair.handoffs.transfer(request(entry), peer=pair.office)
    usable.clear()
    with pytest.raises(BundleUnusable, match="this worker uses: none"):
        await pair.handoffs.transfer(request(entry), peer=pair.office)


async def test_a_bundle_for_another_pool(pair: Pair) -> None:
    other = make_pool(SOURCE_LAYOUT)
    pool = pair.target.pool
    pair.adjust(pool=other)
    await refused(pair, CacheMismatch, "the pool of this worker has .*num_layers=3", entry=pair.source_cache(20))
    pair.adjust(pool=pool)
    other.close()


# -- in mid-transfer --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [0, 2, 4])
async def test_the_lease_expires_and_the_cache_goes(step: int) -> None:
    """Blocks are freed, and used for another cache, while we read."""
    clock = ManualClock()
    pair = make_pair(clock=clock)
    entry = pair.source_cache(200, ttl_s=10)

    def happen(i: int) -> None:
        if i == step:
            clock.now += 1000
            pair.source.sweep()
            pair.source_cache(200, seed=300)

    pair.before_steps(happen)
    await refused(pair, CacheStale, "written or freed since", entry=entry)
    pair.close()


def close_source_at(pair: Pair, step: int, i: int) -> None:
    if i == step:
        pair.source.close()


async def test_the_source_closes_its_pool() -> None:
    for kind in ("inproc", "shm"):
        pair = make_pair(kind)
        pair.before_steps(partial(close_source_at, pair, 5))
        entry = pair.source_cache(200)
        with pytest.raises(CacheStale):
            await pair.handoffs.transfer(request(entry), peer=pair.office)
        await pair.handoffs.aclose()
        assert pair.num_used == 0
        pair.close()


async def test_a_bundle_that_is_switched_off_meanwhile_leaves_no_cache(pair: Pair) -> None:
    """What it had made was dropped when it was; what it makes later would be served."""
    usable = [random_mapper()]
    pair.adjust(mappers=lambda: list(usable))
    pair.before_steps(lambda i: usable.clear() if i == 3 else None)
    await refused(pair, BundleUnusable, "switched off meanwhile", entry=pair.source_cache(200))


async def test_our_pool_is_full(pair: Pair) -> None:
    with pair.target.pool.allocate(60):
        with pytest.raises(PoolFull) as full:
            await pair.handoffs.transfer(request(pair.source_cache(100)), peer=pair.office)
        assert isinstance(full.value, Overloaded) and full.value.retry_after_s is not None
        assert pair.num_used == 60
    await nothing_left(pair)


async def test_the_deadline_passes_between_chunks(pair: Pair) -> None:
    pair.before_steps(lambda i: time.sleep(0.06))
    began = time.monotonic()
    await refused(pair, DeadlineExceeded, "deadline", entry=pair.source_cache(200), deadline_ms=200)
    assert time.monotonic() - began < 1.0


async def test_the_deadline_holds_when_the_loop_has_no_time_to_watch_it(pair: Pair) -> None:
    """Steps that follow one another without a pause: no timer fires between them."""
    steps: list[int] = []

    async def run_step(step: Any) -> Any:
        steps.append(1)
        time.sleep(0.06)  # noqa: ASYNC251
        return step()

    pair.adjust(run_step=run_step)
    await refused(pair, DeadlineExceeded, "deadline", entry=pair.source_cache(200), deadline_ms=200)
    assert len(steps) < 10


async def test_the_deadline_has_no_mercy_with_a_slow_engine(pair: Pair) -> None:
    async def slow_head(token_ids: Sequence[int], salt: str) -> KVCache:
        await asyncio.sleep(30)
        return native_kv(token_ids)

    pair.adjust(prefill_head=slow_head)
    began = time.monotonic()
    await refused(pair, DeadlineExceeded, "deadline", entry=pair.source_cache(200), deadline_ms=100)
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    ("deadline_ms", "given_up_s", "result"),
    [(150, None, "deadline_exceeded"), (250, 0.2, "deadline_exceeded"), (60_000, 0.05, "cancelled")],
    ids=["nobody waits any more", "the caller's clock is ahead", "the caller is gone"],
)
async def test_late_and_cancelled_are_told_apart(
    pair: Pair, deadline_ms: int, given_up_s: float | None, result: str
) -> None:
    outcomes: list[HandoffResult] = []
    pair.adjust(observe=outcomes.append)
    peer = FrozenPeer(pair.office, after_lease=False)
    with pytest.raises((TimeoutError, DeadlineExceeded)):
        async with asyncio.timeout(given_up_s):
            await pair.handoffs.transfer(request(pair.source_cache(40), deadline_ms=deadline_ms), peer=peer)
    assert [outcome.result for outcome in outcomes] == [result]


@pytest.mark.parametrize("after_lease", [False, True])
async def test_a_frozen_peer_holds_nobody_up(pair: Pair, after_lease: bool) -> None:
    entry = pair.source_cache(40)
    peer = FrozenPeer(pair.office, after_lease=after_lease)
    began = time.monotonic()
    if after_lease:
        reply = await pair.handoffs.transfer(request(entry), peer=peer)
        assert reply.num_tokens == 40
        await asyncio.sleep(0)
        assert peer.num_releasing == 1  # the reply did not wait for it
        await pair.handoffs.aclose()  # gives up the lease, which expires at the peer
    else:
        await refused(pair, DeadlineExceeded, "deadline", entry=entry, peer=peer, deadline_ms=100)
    assert time.monotonic() - began < 5


async def test_a_peer_that_is_gone_when_the_lease_is_returned(pair: Pair) -> None:
    class LeavingPeer(ForgingPeer):
        async def release(self, cache_id: str, lease_id: str, *, timeout_s: float = 2.0) -> None:
            raise WorkerUnavailable("gone")

    reply = await pair.handoffs.transfer(request(pair.source_cache(40)), peer=LeavingPeer(pair.office))
    assert reply.num_tokens == 40
    await pair.handoffs.aclose()


async def test_an_engine_that_reads_other_tokens_than_asked(pair: Pair) -> None:
    async def short_head(token_ids: Sequence[int], salt: str) -> KVCache:
        return native_kv(token_ids[:-1])

    pair.adjust(prefill_head=short_head)
    match = r"the engine read 3 tokens from 0, asked for \[0, 4\)"
    await refused(pair, TransferFailed, match, entry=pair.source_cache(40))


@pytest.mark.parametrize("step", range(6))
async def test_cancelling_leaves_nothing_whenever_it_comes(pair: Pair, step: int) -> None:
    entry = pair.source_cache(200)
    reached = asyncio.Event()
    pair.before_steps(lambda i: reached.set() if i == step else None)
    task = asyncio.create_task(pair.handoffs.transfer(request(entry), peer=pair.office))
    await reached.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert pair.num_used == 0
    await nothing_left(pair)


async def test_a_running_step_ends_before_its_blocks_are_freed(pair: Pair) -> None:
    """Or it would write into what is somebody else's by then."""
    entry = pair.source_cache(200)
    mapper = HeldMapper()
    pair.adjust(mappers=lambda: [mapper])
    task = asyncio.create_task(pair.handoffs.transfer(request(entry), peer=pair.office))
    await until(mapper.started.is_set, "the first chunk")
    task.cancel()
    await asyncio.sleep(0.05)
    assert pair.num_used == 25 and not task.done()
    mapper.go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    await nothing_left(pair)


# -- equal handoffs at once -------------------------------------------------------------------------------------------


async def test_equal_handoffs_are_one(pair: Pair) -> None:
    entry, peer = pair.source_cache(100), ForgingPeer(pair.office)
    outcomes: list[HandoffResult] = []
    pair.adjust(observe=outcomes.append)
    replies = await asyncio.gather(*(pair.handoffs.transfer(request(entry), peer=peer) for _ in range(5)))
    assert peer.num_leased == 1 and len({reply.cache_id for reply in replies}) == 1
    assert pair.target.pool.stats.num_caches == 1
    (outcome,) = outcomes  # counted once, however many waited; what it cost is all that was done to the tokens
    assert (outcome.result, outcome.num_mapped, outcome.reply) == ("ok", 96, replies[0])
    assert outcome.mapping_s * 1000 == pytest.approx(replies[0].copy_ms + replies[0].map_ms + replies[0].write_ms)
    await pair.handoffs.transfer(request(entry), peer=peer)
    assert peer.num_leased == 2


@pytest.mark.parametrize("changes", [{"num_tokens": 60}, {"native_head": 8}, {"mapper": random_mapper().bundle_id}])
async def test_other_handoffs_are_their_own(pair: Pair, changes: dict[str, Any]) -> None:
    entry, peer = pair.source_cache(100), ForgingPeer(pair.office)
    one, other = await asyncio.gather(
        pair.handoffs.transfer(request(entry), peer=peer), pair.handoffs.transfer(request(entry, **changes), peer=peer)
    )
    assert peer.num_leased == 2 and one.cache_id != other.cache_id


async def test_a_tenant_does_not_share_anothers_handoff(pair: Pair) -> None:
    entry = pair.source_cache(100)
    mine = asyncio.create_task(pair.handoffs.transfer(request(entry), peer=pair.office))
    with pytest.raises(CacheMismatch, match="another tenant"):
        await pair.handoffs.transfer(request(entry, tenant_salt=OTHER_SALT), peer=pair.office)
    assert (await mine).num_tokens == 100


async def test_one_that_is_cancelled_leaves_the_others_theirs(pair: Pair) -> None:
    entry = pair.source_cache(200)
    reached = asyncio.Event()
    pair.before_steps(lambda i: reached.set() if i == 4 else None)
    first, second = (
        asyncio.create_task(pair.handoffs.transfer(request(entry), peer=pair.office)) for _ in range(2)
    )
    await reached.wait()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert (await second).num_tokens == 200


async def test_the_last_to_leave_stops_the_work(pair: Pair) -> None:
    entry = pair.source_cache(200)
    reached = asyncio.Event()
    pair.before_steps(lambda i: reached.set() if i == 4 else None)
    tasks = [asyncio.create_task(pair.handoffs.transfer(request(entry), peer=pair.office)) for _ in range(2)]
    await reached.wait()
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    assert all(task.cancelled() for task in tasks)
    await nothing_left(pair)


async def test_a_newcomer_does_not_join_work_that_is_being_stopped(pair: Pair) -> None:
    entry = pair.source_cache(200)
    mapper = HeldMapper()
    pair.adjust(mappers=lambda: [mapper])
    leaving = asyncio.create_task(pair.handoffs.transfer(request(entry), peer=pair.office))
    await until(mapper.started.is_set, "the first chunk")
    leaving.cancel()
    await asyncio.sleep(0.05)
    newcomer = asyncio.create_task(pair.handoffs.transfer(request(entry), peer=pair.office))
    await asyncio.sleep(0.05)
    mapper.go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert (await newcomer).num_tokens == 200


async def test_the_patient_one_gets_it_when_the_hurried_one_is_late(pair: Pair) -> None:
    entry = pair.source_cache(200)
    pair.before_steps(lambda i: time.sleep(0.02))
    hurried = asyncio.create_task(pair.handoffs.transfer(request(entry, deadline_ms=100), peer=pair.office))
    patient = asyncio.create_task(pair.handoffs.transfer(request(entry), peer=pair.office))
    with pytest.raises(DeadlineExceeded):
        await hurried
    assert (await patient).num_tokens == 200


async def test_an_error_reaches_all_who_wait(pair: Pair) -> None:
    entry = pair.source_cache(20)
    outcomes = await asyncio.gather(
        *(pair.handoffs.transfer(request(entry, num_tokens=21), peer=pair.office) for _ in range(3)),
        return_exceptions=True,
    )
    assert [type(outcome) for outcome in outcomes] == [InvalidRequest] * 3
    await nothing_left(pair)


async def test_too_many_at_once_are_sent_away(pair: Pair) -> None:
    pair.adjust(max_handoffs=2)
    entry = pair.source_cache(100)
    running = [
        asyncio.create_task(pair.handoffs.transfer(request(entry, num_tokens=n), peer=pair.office)) for n in (50, 60)
    ]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="2 pieces of work are under way") as refused:
        await pair.handoffs.transfer(request(entry, num_tokens=70), peer=pair.office)
    assert refused.value.retry_after_s is not None
    joined = pair.handoffs.transfer(request(entry, num_tokens=60), peer=pair.office)
    assert (await joined).cache_id == (await running[1]).cache_id
    await running[0]


async def test_closing_stops_what_runs(pair: Pair) -> None:
    entry = pair.source_cache(200)
    reached = asyncio.Event()
    pair.before_steps(lambda i: reached.set() if i == 4 else None)
    task = asyncio.create_task(pair.handoffs.transfer(request(entry), peer=pair.office))
    await reached.wait()
    await pair.handoffs.aclose()
    with pytest.raises(WorkerUnavailable, match="the worker is stopping"):
        await task
    await nothing_left(pair)


def test_the_two_fingerprints_differ() -> None:
    assert SOURCE != TARGET
