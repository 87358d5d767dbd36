"""A failed handoff reports the cause, returns nothing wrong and leaves nothing behind."""

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
    BlockingMapper,
    BrokenMapper,
    ForgingPeer,
    FrozenPeer,
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


async def assert_fails(
    pair: Pair, error: type[KvrelayError], match: str, *, entry: CacheEntry, peer: Any = None, **changes: Any
) -> None:
    """Check that the handoff fails with this error and releases all blocks and leases."""
    with pytest.raises(error, match=match):
        await pair.handoffs.transfer(request(entry, **changes), peer=peer or pair.local_peer)
    await assert_nothing_left(pair)


async def assert_nothing_left(pair: Pair) -> None:
    await pair.handoffs.aclose()
    assert pair.num_used == 0
    assert pair.target.pool.stats.num_caches == 0
    assert pair.source.stats.num_leases == 0


# -- the request -----------------------------------------------------------------------------------------------------


async def test_unknown_cache_is_rejected(pair: Pair) -> None:
    await assert_fails(pair, CacheNotFound, "no cache kvc-0", entry=pair.source_cache(20), cache_id="kvc-" + "0" * 32)


async def test_expired_cache_is_rejected() -> None:
    clock = ManualClock()
    pair = make_pair(clock=clock)
    entry = pair.source_cache(20, ttl_s=5)
    clock.now += 6
    await assert_fails(pair, CacheNotFound, "no cache", entry=entry)
    pair.close()


async def test_cache_of_another_tenant_is_rejected(pair: Pair) -> None:
    await assert_fails(pair, CacheMismatch, "another tenant", entry=pair.source_cache(20), tenant_salt=OTHER_SALT)


async def test_wrong_source_or_target_model_is_rejected(pair: Pair) -> None:
    entry = pair.source_cache(20)
    await assert_fails(pair, CacheMismatch, "of model small, not tiny", entry=entry, source_model="tiny")
    await assert_fails(
        pair, InvalidRequest, "unknown model 'huge'; this worker runs 'large'", entry=entry, target_model="huge"
    )


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"num_tokens": 21}, "num_tokens is 21, but kvc-.* has 20"),
        ({"native_head": 20}, "native_head 20 leaves none of 20 tokens to map"),
        ({"native_head": 9, "num_tokens": 8}, "native_head 9 leaves none of 8"),
    ],
)
async def test_lengths_beyond_the_cache_are_rejected(pair: Pair, changes: dict[str, int], match: str) -> None:
    await assert_fails(pair, InvalidRequest, match, entry=pair.source_cache(20), **changes)


async def test_mapped_source_is_rejected(pair: Pair) -> None:
    with pair.source.allocate(5) as fresh:
        entry = pair.source.put(fresh.blocks, range(20), SALT, ttl_s=60, provenance="mapped:abc", mapped=Span(0, 20))
    await assert_fails(
        pair, CacheMismatch, "is mapped:abc; the source must be exact: the errors of two maps", entry=entry
    )


# -- the ticket ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("forged", "error", "match"),
    [
        ({"cache_id": "kvc-" + "1" * 32}, TransferFailed, "the ticket is for kvc-1"),
        ({"digest": "0" * 64}, CacheMismatch, "digest"),
        ({"token_ids": [9, *range(1, 20)]}, CacheMismatch, "digest"),
        ({"digest": token_digest(range(20), OTHER_SALT)}, CacheMismatch, "not that of its tokens under this tenant's"),
        ({"token_ids": list(range(19))}, TransferFailed, "19 token ids; 20 tokens need 5 blocks"),
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
        ({"layout": SOURCE_LAYOUT.model_copy(update={"block_tokens": 0})}, TransferFailed, "20 tokens need 20 blocks"),
    ],
    ids=lambda value: str(next(iter(value))) if isinstance(value, dict) else "",
)
async def test_forged_ticket_is_rejected(
    pair: Pair, forged: dict[str, Any], error: type[KvrelayError], match: str
) -> None:
    peer = ForgingPeer(pair.local_peer, **forged)
    entry = pair.source_cache(20)
    with pytest.raises(error, match=match):
        await pair.handoffs.transfer(request(entry), peer=peer)
    await pair.handoffs.aclose()
    assert peer.num_released == 1
    assert pair.num_used == 0


async def test_forged_layout_is_caught_by_the_pool_file() -> None:
    pair = make_pair("shm")
    peer = ForgingPeer(pair.local_peer, layout=SOURCE_LAYOUT.model_copy(update={"dtype": "float16"}))
    await assert_fails(
        pair, TransferFailed, "the pool has 64 blocks of 1536 bytes", entry=pair.source_cache(20), peer=peer
    )
    pair.close()


async def test_unsupported_transport_is_rejected(pair: Pair) -> None:
    pair.adjust(site=pair.target.site.model_copy(update={"transports": ["shm"]}))
    await assert_fails(
        pair, TransferFailed, "the source offers inproc; this worker supports shm", entry=pair.source_cache(20)
    )


async def test_ticket_of_earlier_epoch_is_stale() -> None:
    """The worker of the ticket has restarted since."""
    pair = make_pair("shm")
    entry = pair.source_cache(20)
    ticket = await pair.local_peer.lease(entry.cache_id, LeaseRequest(ttl_s=60, tenant_salt=SALT), timeout_s=1)
    pair.source.close()
    restarted = make_pool(SOURCE_LAYOUT, SOURCE, kind="shm")
    pair.source = restarted
    pair.local_peer = type(pair.local_peer)(restarted, "small")
    again = pair.source_cache(20)
    old = ticket.pool
    for export in (old, restarted.export().model_copy(update={"epoch": old.epoch})):
        peer = ForgingPeer(pair.local_peer, pool=export, exports=[export])
        await assert_fails(pair, CacheStale, "is gone|has epoch", entry=again, peer=peer)
    pair.close()


# -- mappers ----------------------------------------------------------------------------------------------------------


async def test_weights_without_bundle_are_rejected(pair: Pair) -> None:
    entry = pair.source_cache(20)
    for mappers in ([], [random_mapper(target="8b" * 32)], [random_mapper(source="8b" * 32)]):
        pair.adjust(mappers=lambda mappers=mappers: mappers)
        await assert_fails(pair, BundleUnusable, "no usable bundle 'auto' from weights 515151515151", entry=entry)


async def test_unexpected_error_is_observed(pair: Pair) -> None:
    results: list[HandoffResult] = []
    pair.adjust(mappers=lambda: [BrokenMapper()], observe=results.append)
    with pytest.raises(RuntimeError, match="out of memory"):
        await pair.handoffs.transfer(request(pair.source_cache(20)), peer=pair.local_peer)
    assert [result.result for result in results] == ["internal_error"]
    await assert_nothing_left(pair)


@pytest.mark.parametrize(("model_len", "rope_limit", "limit"), [(90, None, 90), (None, 80, 80), (90, 80, 80)])
@pytest.mark.parametrize("role", ["source_rope", "target_rope"])
async def test_more_tokens_than_positions_are_rejected(
    pair: Pair, model_len: int | None, rope_limit: int | None, limit: int, role: str
) -> None:
    mapper = random_mapper()
    getattr(mapper, role).limit = rope_limit
    pair.adjust(mappers=lambda: [mapper], max_tokens=model_len)
    entry = pair.source_cache(100)
    for requested, num_tokens in ((None, 100), (limit + 1, limit + 1)):
        message = f"cannot hand over {num_tokens} tokens; .* {mapper.bundle_id} support at most {limit}$"
        await assert_fails(pair, InvalidRequest, message, entry=entry, num_tokens=requested)
    assert (await pair.handoffs.transfer(request(entry, num_tokens=limit), peer=pair.local_peer)).num_tokens == limit


async def test_bundle_is_chosen_by_id(pair: Pair) -> None:
    first, second = random_mapper(1), random_mapper(2)
    pair.adjust(mappers=lambda: [first, second])
    entry = pair.source_cache(20)
    for mapper in (first, second):
        reply = await pair.handoffs.transfer(request(entry, mapper=mapper.bundle_id), peer=pair.local_peer)
        assert reply.mapper == mapper.bundle_id
    with pytest.raises(BundleUnusable, match=f"'feed'.*this worker uses: {first.bundle_id} from 515151515151, "):
        await pair.handoffs.transfer(request(entry, mapper="feed"), peer=pair.local_peer)


async def test_bundle_switched_off_between_handoffs_is_not_used(pair: Pair) -> None:
    usable = [random_mapper()]
    pair.adjust(mappers=lambda: usable)
    entry = pair.source_cache(20)
    await pair.handoffs.transfer(request(entry), peer=pair.local_peer)
    usable.clear()
    with pytest.raises(BundleUnusable, match="this worker uses: none"):
        await pair.handoffs.transfer(request(entry), peer=pair.local_peer)


async def test_bundle_for_another_pool_layout_is_rejected(pair: Pair) -> None:
    other = make_pool(SOURCE_LAYOUT)
    pool = pair.target.pool
    pair.adjust(pool=other)
    await assert_fails(pair, CacheMismatch, "the pool of this worker has .*num_layers=3", entry=pair.source_cache(20))
    pair.adjust(pool=pool)
    other.close()


# -- during the handoff -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [0, 2, 4])
async def test_blocks_reused_after_lease_expiry_are_stale(step: int) -> None:
    """Blocks are freed and used for another cache during the handoff."""
    clock = ManualClock()
    pair = make_pair(clock=clock)
    entry = pair.source_cache(200, ttl_s=10)

    def callback(i: int) -> None:
        if i == step:
            clock.now += 1000
            pair.source.sweep()
            pair.source_cache(200, seed=300)

    pair.before_steps(callback)
    await assert_fails(pair, CacheStale, "written or freed since", entry=entry)
    pair.close()


def close_source_at(pair: Pair, step: int, i: int) -> None:
    if i == step:
        pair.source.close()


async def test_source_closed_during_handoff_is_stale() -> None:
    for kind in ("inproc", "shm"):
        pair = make_pair(kind)
        pair.before_steps(partial(close_source_at, pair, 5))
        entry = pair.source_cache(200)
        with pytest.raises(CacheStale):
            await pair.handoffs.transfer(request(entry), peer=pair.local_peer)
        await pair.handoffs.aclose()
        assert pair.num_used == 0
        pair.close()


async def test_bundle_switched_off_during_handoff_leaves_no_cache(pair: Pair) -> None:
    """Its caches were dropped then; a new one would be served."""
    usable = [random_mapper()]
    pair.adjust(mappers=lambda: list(usable))
    pair.before_steps(lambda i: usable.clear() if i == 3 else None)
    await assert_fails(pair, BundleUnusable, "switched off meanwhile", entry=pair.source_cache(200))


async def test_full_target_pool_raises_pool_full(pair: Pair) -> None:
    with pair.target.pool.allocate(60):
        with pytest.raises(PoolFull) as full:
            await pair.handoffs.transfer(request(pair.source_cache(100)), peer=pair.local_peer)
        assert isinstance(full.value, Overloaded) and full.value.retry_after_s is not None
        assert pair.num_used == 60
    await assert_nothing_left(pair)


async def test_deadline_between_chunks_ends_the_handoff(pair: Pair) -> None:
    pair.before_steps(lambda i: time.sleep(0.06))
    began = time.monotonic()
    await assert_fails(pair, DeadlineExceeded, "deadline", entry=pair.source_cache(200), deadline_ms=200)
    assert time.monotonic() - began < 1.0


async def test_deadline_holds_without_idle_event_loop(pair: Pair) -> None:
    """No timer fires between steps that follow each other without a pause."""
    steps: list[int] = []

    async def run_step(step: Any) -> Any:
        steps.append(1)
        time.sleep(0.06)  # noqa: ASYNC251
        return step()

    pair.adjust(run_step=run_step)
    await assert_fails(pair, DeadlineExceeded, "deadline", entry=pair.source_cache(200), deadline_ms=200)
    assert len(steps) < 10


async def test_deadline_holds_with_slow_engine(pair: Pair) -> None:
    async def slow_head(token_ids: Sequence[int], salt: str) -> KVCache:
        await asyncio.sleep(30)
        return native_kv(token_ids)

    pair.adjust(prefill_head=slow_head)
    began = time.monotonic()
    await assert_fails(pair, DeadlineExceeded, "deadline", entry=pair.source_cache(200), deadline_ms=100)
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    ("deadline_ms", "timeout_s", "result"),
    [(150, None, "deadline_exceeded"), (250, 0.2, "deadline_exceeded"), (60_000, 0.05, "cancelled")],
    ids=["past deadline", "caller's clock is ahead", "caller is gone"],
)
async def test_late_and_cancelled_results_differ(
    pair: Pair, deadline_ms: int, timeout_s: float | None, result: str
) -> None:
    results: list[HandoffResult] = []
    pair.adjust(observe=results.append)
    peer = FrozenPeer(pair.local_peer, after_lease=False)
    with pytest.raises((TimeoutError, DeadlineExceeded)):
        async with asyncio.timeout(timeout_s):
            await pair.handoffs.transfer(request(pair.source_cache(40), deadline_ms=deadline_ms), peer=peer)
    assert [observed.result for observed in results] == [result]


@pytest.mark.parametrize("after_lease", [False, True])
async def test_frozen_peer_does_not_delay_callers(pair: Pair, after_lease: bool) -> None:
    entry = pair.source_cache(40)
    peer = FrozenPeer(pair.local_peer, after_lease=after_lease)
    began = time.monotonic()
    if after_lease:
        reply = await pair.handoffs.transfer(request(entry), peer=peer)
        assert reply.num_tokens == 40
        await asyncio.sleep(0)
        assert peer.num_releasing == 1  # the reply does not wait for it
        await pair.handoffs.aclose()  # abandons the release; the lease expires at the peer
    else:
        await assert_fails(pair, DeadlineExceeded, "deadline", entry=entry, peer=peer, deadline_ms=100)
    assert time.monotonic() - began < 5


async def test_peer_gone_at_lease_release_does_not_fail_the_handoff(pair: Pair) -> None:
    class GonePeer(ForgingPeer):
        async def release(self, cache_id: str, lease_id: str, *, timeout_s: float = 2.0) -> None:
            raise WorkerUnavailable("gone")

    reply = await pair.handoffs.transfer(request(pair.source_cache(40)), peer=GonePeer(pair.local_peer))
    assert reply.num_tokens == 40
    await pair.handoffs.aclose()


async def test_short_head_is_rejected(pair: Pair) -> None:
    async def short_head(token_ids: Sequence[int], salt: str) -> KVCache:
        return native_kv(token_ids[:-1])

    pair.adjust(prefill_head=short_head)
    match = r"the engine prefilled 3 tokens from 0 instead of \[0, 4\)"
    await assert_fails(pair, TransferFailed, match, entry=pair.source_cache(40))


@pytest.mark.parametrize("step", range(6))
async def test_cancellation_at_any_step_leaves_nothing(pair: Pair, step: int) -> None:
    entry = pair.source_cache(200)
    reached = asyncio.Event()
    pair.before_steps(lambda i: reached.set() if i == step else None)
    task = asyncio.create_task(pair.handoffs.transfer(request(entry), peer=pair.local_peer))
    await reached.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert pair.num_used == 0
    await assert_nothing_left(pair)


async def test_running_step_ends_before_its_blocks_are_freed(pair: Pair) -> None:
    """Otherwise it would write into blocks of another cache."""
    entry = pair.source_cache(200)
    mapper = BlockingMapper()
    pair.adjust(mappers=lambda: [mapper])
    task = asyncio.create_task(pair.handoffs.transfer(request(entry), peer=pair.local_peer))
    await until(mapper.started.is_set, "the first chunk")
    task.cancel()
    await asyncio.sleep(0.05)
    assert pair.num_used == 25 and not task.done()
    mapper.released.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    await assert_nothing_left(pair)


# -- equal handoffs at once -------------------------------------------------------------------------------------------


async def test_equal_handoffs_are_shared(pair: Pair) -> None:
    entry, peer = pair.source_cache(100), ForgingPeer(pair.local_peer)
    results: list[HandoffResult] = []
    pair.adjust(observe=results.append)
    replies = await asyncio.gather(*(pair.handoffs.transfer(request(entry), peer=peer) for _ in range(5)))
    assert peer.num_leased == 1 and len({reply.cache_id for reply in replies}) == 1
    assert pair.target.pool.stats.num_caches == 1
    (result,) = results  # observed once, with all that was done to the tokens
    assert (result.result, result.num_mapped, result.reply) == ("ok", 96, replies[0])
    assert result.mapping_s * 1000 == pytest.approx(replies[0].copy_ms + replies[0].map_ms + replies[0].write_ms)
    await pair.handoffs.transfer(request(entry), peer=peer)
    assert peer.num_leased == 2


@pytest.mark.parametrize("changes", [{"num_tokens": 60}, {"native_head": 8}, {"mapper": random_mapper().bundle_id}])
async def test_different_handoffs_are_not_shared(pair: Pair, changes: dict[str, Any]) -> None:
    entry, peer = pair.source_cache(100), ForgingPeer(pair.local_peer)
    one, other = await asyncio.gather(
        pair.handoffs.transfer(request(entry), peer=peer), pair.handoffs.transfer(request(entry, **changes), peer=peer)
    )
    assert peer.num_leased == 2 and one.cache_id != other.cache_id


async def test_tenants_do_not_share_handoffs(pair: Pair) -> None:
    entry = pair.source_cache(100)
    own = asyncio.create_task(pair.handoffs.transfer(request(entry), peer=pair.local_peer))
    with pytest.raises(CacheMismatch, match="another tenant"):
        await pair.handoffs.transfer(request(entry, tenant_salt=OTHER_SALT), peer=pair.local_peer)
    assert (await own).num_tokens == 100


async def test_cancelled_caller_does_not_affect_others(pair: Pair) -> None:
    entry = pair.source_cache(200)
    reached = asyncio.Event()
    pair.before_steps(lambda i: reached.set() if i == 4 else None)
    first, second = (
        asyncio.create_task(pair.handoffs.transfer(request(entry), peer=pair.local_peer)) for _ in range(2)
    )
    await reached.wait()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert (await second).num_tokens == 200


async def test_last_cancelled_caller_stops_the_handoff(pair: Pair) -> None:
    entry = pair.source_cache(200)
    reached = asyncio.Event()
    pair.before_steps(lambda i: reached.set() if i == 4 else None)
    tasks = [asyncio.create_task(pair.handoffs.transfer(request(entry), peer=pair.local_peer)) for _ in range(2)]
    await reached.wait()
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    assert all(task.cancelled() for task in tasks)
    await assert_nothing_left(pair)


async def test_new_caller_does_not_join_stopping_handoff(pair: Pair) -> None:
    entry = pair.source_cache(200)
    mapper = BlockingMapper()
    pair.adjust(mappers=lambda: [mapper])
    cancelled = asyncio.create_task(pair.handoffs.transfer(request(entry), peer=pair.local_peer))
    await until(mapper.started.is_set, "the first chunk")
    cancelled.cancel()
    await asyncio.sleep(0.05)
    newcomer = asyncio.create_task(pair.handoffs.transfer(request(entry), peer=pair.local_peer))
    await asyncio.sleep(0.05)
    mapper.released.set()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    assert (await newcomer).num_tokens == 200


async def test_caller_with_later_deadline_gets_the_result(pair: Pair) -> None:
    entry = pair.source_cache(200)
    pair.before_steps(lambda i: time.sleep(0.02))
    early = asyncio.create_task(pair.handoffs.transfer(request(entry, deadline_ms=100), peer=pair.local_peer))
    late = asyncio.create_task(pair.handoffs.transfer(request(entry), peer=pair.local_peer))
    with pytest.raises(DeadlineExceeded):
        await early
    assert (await late).num_tokens == 200


async def test_error_reaches_all_callers(pair: Pair) -> None:
    entry = pair.source_cache(20)
    results = await asyncio.gather(
        *(pair.handoffs.transfer(request(entry, num_tokens=21), peer=pair.local_peer) for _ in range(3)),
        return_exceptions=True,
    )
    assert [type(result) for result in results] == [InvalidRequest] * 3
    await assert_nothing_left(pair)


async def test_too_many_handoffs_raise_overloaded(pair: Pair) -> None:
    pair.adjust(max_handoffs=2)
    entry = pair.source_cache(100)
    running = [
        asyncio.create_task(pair.handoffs.transfer(request(entry, num_tokens=n), peer=pair.local_peer))
        for n in (50, 60)
    ]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="2 jobs are running") as raised:
        await pair.handoffs.transfer(request(entry, num_tokens=70), peer=pair.local_peer)
    assert raised.value.retry_after_s is not None
    joined = pair.handoffs.transfer(request(entry, num_tokens=60), peer=pair.local_peer)
    assert (await joined).cache_id == (await running[1]).cache_id
    await running[0]


async def test_close_stops_running_handoffs(pair: Pair) -> None:
    entry = pair.source_cache(200)
    reached = asyncio.Event()
    pair.before_steps(lambda i: reached.set() if i == 4 else None)
    task = asyncio.create_task(pair.handoffs.transfer(request(entry), peer=pair.local_peer))
    await reached.wait()
    await pair.handoffs.aclose()
    with pytest.raises(WorkerUnavailable, match="the worker is stopping"):
        await task
    await assert_nothing_left(pair)


def test_fingerprints_differ() -> None:
    assert SOURCE != TARGET
