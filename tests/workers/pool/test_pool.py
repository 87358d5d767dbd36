from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.workers.pool.support import LAYOUT, OTHER_SALT, SALT, ManualClock, assert_same, random_kv
from workers.api.errors import (
    BundleUnusable,
    CacheMismatch,
    CacheNotFound,
    InvalidRequest,
    KvrelayError,
    Overloaded,
    PoolFull,
    WorkerUnavailable,
)
from workers.digest import token_digest
from workers.pool.entries import CacheEntry, Span
from workers.pool.pool import Pool

SIZE = LAYOUT.block_tokens
BUNDLE = "mapped:0123456789abcdef"


def store(pool: Pool, num_tokens: int, *, first: int = 100, ttl_s: float = 60.0, salt: str = SALT) -> CacheEntry:
    ids = range(first, first + num_tokens)
    return pool.store(list(ids), random_kv(0, num_tokens, seed=first), salt, ttl_s=ttl_s)


def put_mapped(pool: Pool, num_tokens: int, *, head: int = 1, first: int = 100) -> CacheEntry:
    with pool.allocate(-(-num_tokens // SIZE)) as fresh:
        pool.scatter(fresh.blocks, random_kv(0, num_tokens, seed=first))
        return pool.put(
            fresh.blocks, range(first, first + num_tokens), SALT, ttl_s=60, provenance=BUNDLE,
            mapped=Span(head, num_tokens),
        )  # fmt: skip


def free(pool: Pool) -> int:
    return pool.stats.free_blocks


# -- caches ---------------------------------------------------------------------------------------------------------


def test_stored_cache_reads_back(pool: Pool, clock: ManualClock) -> None:
    entry = store(pool, 10)
    assert_same(pool.gather(entry.blocks, 0, 10), random_kv(0, 10, seed=100))
    assert pool.get(entry.cache_id, SALT) == entry
    assert entry.token_ids == tuple(range(100, 110))
    assert entry.digest == token_digest(entry.token_ids, SALT)
    assert entry.is_exact and entry.mapped is None
    assert entry.expires_at == clock.now + 60
    assert free(pool) == 13


def test_gather_fills_given_tensors(pool: Pool) -> None:
    entry = store(pool, 10)
    out = random_kv(3, 9, seed=1)
    assert pool.gather(entry.blocks, 3, 9, out) is out
    assert_same(out, random_kv(0, 10, seed=100).slice(3, 9))
    with pytest.raises(InvalidRequest, match=r"out holds 6 tokens from 3; it must hold \[0, 6\)"):
        pool.gather(entry.blocks, 0, 6, out)


@pytest.mark.parametrize("cut", [1, 4, 6, 8, 10])
def test_extended_cache_shares_whole_blocks_and_copies_cut_one(pool: Pool, cut: int) -> None:
    old = store(pool, 10)
    suffix = random_kv(cut, 15, seed=2)
    ids = [*old.token_ids[:cut], *range(500, 500 + 15 - cut)]
    with pool.hold(old.cache_id, SALT) as held:
        new = pool.store(ids, suffix, SALT, ttl_s=60, prefix=held)
    shared = cut // SIZE
    assert new.blocks[:shared] == old.blocks[:shared]
    assert not set(new.blocks[shared:]) & set(old.blocks)
    assert_same(pool.gather(new.blocks, 0, cut), random_kv(0, 10, seed=100).slice(0, cut))
    assert_same(pool.gather(new.blocks, cut, 15), suffix)
    assert_same(pool.gather(old.blocks, 0, 10), random_kv(0, 10, seed=100))
    assert free(pool) == 16 - 3 - (4 - shared)
    pool.drop(old.cache_id, SALT)
    assert_same(pool.gather(new.blocks, 0, cut), random_kv(0, 10, seed=100).slice(0, cut))


def test_cache_of_another_tenant_is_rejected(pool: Pool) -> None:
    entry = store(pool, 10)
    for call in (
        lambda: pool.get(entry.cache_id, OTHER_SALT),
        lambda: pool.hold(entry.cache_id, OTHER_SALT),
        lambda: pool.lease(entry.cache_id, OTHER_SALT, ttl_s=1),
        lambda: pool.drop(entry.cache_id, OTHER_SALT),
    ):
        with pytest.raises(CacheMismatch, match="belongs to another tenant"):
            call()
    assert pool.get(entry.cache_id, SALT) == entry


def test_prefix_of_another_tenant_is_rejected(pool: Pool) -> None:
    entry = store(pool, 8)
    with pool.hold(entry.cache_id, SALT) as held, pytest.raises(CacheMismatch, match="another tenant"):
        pool.store(range(100, 112), random_kv(8, 12), OTHER_SALT, ttl_s=60, prefix=held)
    assert pool.match_prefix(entry.token_ids, OTHER_SALT).blocks == ()


def test_dropped_cache_is_not_found(pool: Pool) -> None:
    entry = store(pool, 10)
    pool.drop(entry.cache_id, SALT)
    with pytest.raises(CacheNotFound, match=f"no cache {entry.cache_id} in epoch {pool.epoch}"):
        pool.get(entry.cache_id, SALT)
    assert free(pool) == 16


def test_expired_cache_is_not_found(pool: Pool, clock: ManualClock) -> None:
    short, long = store(pool, 8, ttl_s=5), store(pool, 8, first=300, ttl_s=50)
    clock.now += 5
    with pytest.raises(CacheNotFound):
        pool.get(short.cache_id, SALT)
    assert pool.get(long.cache_id, SALT) == long
    pool.sweep(clock.now + 45)
    assert free(pool) == 16


def test_put_rejects_inconsistent_arguments(pool: Pool) -> None:
    def rejects(message: str, blocks: Sequence[int], num_tokens: int, **more: Any) -> None:
        with pytest.raises(InvalidRequest, match=message):
            pool.put(blocks, range(num_tokens), SALT, ttl_s=1, **more)

    with pool.allocate(2) as fresh:
        rejects("5 tokens need 2 blocks, and at least one; got 1", fresh.blocks[:1], 5)
        rejects("0 tokens need 0 blocks", (), 0)
        rejects("block 16 does not exist; this pool has blocks 0..15", (0, 16), 5)
        rejects("block -1 does not exist", (0, -1), 5)
        rejects("does not allow", fresh.blocks, 5, provenance=BUNDLE)
        rejects("does not allow", fresh.blocks, 5, mapped=Span(0, 5))
        rejects("are outside of 5", fresh.blocks, 5, provenance=BUNDLE, mapped=Span(0, 6))
    assert pool.stats.num_caches == 0


def test_store_rejects_inconsistent_arguments(pool: Pool) -> None:
    entry = store(pool, 10)
    with pool.hold(entry.cache_id, SALT) as held:
        for error, message, ids, kv in (
            (InvalidRequest, "13 tokens, but the KV ends at 12", range(100, 113), random_kv(10, 12)),
            (InvalidRequest, "starts at 11, past the 10 tokens", range(100, 112), random_kv(11, 12)),
            (CacheMismatch, "the first 10 tokens differ from those of kvc-", range(101, 113), random_kv(10, 12)),
        ):
            with pytest.raises(error, match=message):
                pool.store(ids, kv, SALT, ttl_s=1, prefix=held)
    assert free(pool) == 13


# -- exact prefixes -------------------------------------------------------------------------------------------------


def test_exact_prefix_is_found_in_whole_blocks(pool: Pool) -> None:
    entry = store(pool, 10)
    for ids, num_tokens in (
        (list(entry.token_ids), 8),
        ([*entry.token_ids[:8], 1, 2, 3, 4], 8),
        ([*entry.token_ids[:7], 1], 4),
        ([1, *entry.token_ids[1:]], 0),
        ([], 0),
    ):
        with pool.match_prefix(ids, SALT) as match:
            assert (match.num_tokens, match.blocks) == (num_tokens, entry.blocks[: num_tokens // SIZE])


def test_prefix_is_not_found_for_another_tenant(pool: Pool) -> None:
    entry = store(pool, 8)
    assert pool.match_prefix(entry.token_ids, OTHER_SALT).num_tokens == 0


def test_mapped_blocks_are_not_found_by_tokens(pool: Pool) -> None:
    entry = put_mapped(pool, 12)
    assert pool.match_prefix(entry.token_ids, SALT).blocks == ()
    with pytest.raises(CacheMismatch, match=f"is {BUNDLE}; an exact cache is required"):
        pool.get(entry.cache_id, SALT, require_exact=True)
    with pytest.raises(CacheMismatch):
        pool.hold(entry.cache_id, SALT, require_exact=True)


@pytest.mark.parametrize("start", [0, 1, 4, 8, 12])
def test_cache_extended_over_mapped_blocks_stays_mapped(pool: Pool, start: int) -> None:
    mapped = put_mapped(pool, 12, head=4)
    ids = [*mapped.token_ids, *range(500, 504)]
    with pool.hold(mapped.cache_id, SALT) as held:
        longer = pool.store(ids, random_kv(start, 16), SALT, ttl_s=60, prefix=held)
    assert longer.provenance == BUNDLE and not longer.is_exact
    assert longer.mapped == Span(min(start, 4), start)
    assert pool.match_prefix(ids, SALT).blocks == ()


def test_equal_mapped_cache_does_not_hide_exact_one(pool: Pool) -> None:
    exact = store(pool, 8)
    put_mapped(pool, 8)
    with pool.match_prefix(exact.token_ids, SALT) as match:
        assert match.blocks == exact.blocks


@pytest.mark.parametrize("dropped", [0, 1])
def test_remaining_one_of_two_equal_caches_is_found(pool: Pool, dropped: int) -> None:
    caches = [store(pool, 8), store(pool, 8)]
    pool.drop(caches.pop(dropped).cache_id, SALT)
    with pool.match_prefix(caches[0].token_ids, SALT) as match:
        assert match.blocks == caches[0].blocks
    pool.drop(caches[0].cache_id, SALT)
    assert pool.match_prefix(caches[0].token_ids, SALT).blocks == ()


def test_freed_block_is_not_found(pool: Pool) -> None:
    entry = store(pool, 8)
    pool.drop(entry.cache_id, SALT)
    assert pool.match_prefix(entry.token_ids, SALT).blocks == ()


@pytest.mark.parametrize("differs_at", [0, 255, 256, 700, 999])
def test_common_prefix_may_end_anywhere(pool: Pool, differs_at: int) -> None:
    entry = replace(store(pool, 8), token_ids=tuple(range(1000)))
    ids = [*range(differs_at), 5000, *range(differs_at + 1, 1200)]
    assert entry.common_prefix(ids) == differs_at and entry.common_prefix(range(1200)) == 1000


def test_common_prefix_counts_equal_first_tokens(pool: Pool) -> None:
    entry = store(pool, 6)
    for ids, shared in (([], 0), ([100], 1), (range(100, 120), 6), ([100, 101, 7, 103], 2), ([1], 0)):
        assert entry.common_prefix(list(ids)) == shared


@pytest.mark.parametrize("is_barred", [True, False])
def test_barred_provenance_is_removed_and_not_stored(pool: Pool, is_barred: bool) -> None:
    """This includes a cache that is being extended over such a cache."""
    base, other = put_mapped(pool, 8), store(pool, 8, first=300)
    with pool.hold(base.cache_id, SALT) as held:
        pool.bar(BUNDLE)
        assert not pool.mapped_caches() and pool.get(other.cache_id, SALT)
        if is_barred:
            with pytest.raises(BundleUnusable, match=BUNDLE):
                pool.store([*base.token_ids, 1, 2], random_kv(8, 10), SALT, ttl_s=60, prefix=held)
        else:
            pool.unbar(BUNDLE)
            pool.store([*base.token_ids, 1, 2], random_kv(8, 10), SALT, ttl_s=60, prefix=held)
    assert free(pool) == 16 - 2 - (0 if is_barred else 3)


def test_allowed_cache_of_barred_provenance_is_kept(pool: Pool) -> None:
    pool.bar(BUNDLE)
    with pool.allocate(2) as fresh:
        tried = pool.put(
            fresh.blocks, range(8), SALT, ttl_s=60, provenance=BUNDLE, mapped=Span(1, 8), allow_barred=True
        )
    pool.bar(BUNDLE)
    assert pool.mapped_caches() == [tried]


def test_discard_if_present_leaves_successor(pool: Pool) -> None:
    mapped = put_mapped(pool, 8)
    exact = store(pool, 8)
    pool.supersede(exact)
    pool.discard_if_present(mapped.cache_id)
    assert pool.peek(mapped.cache_id) == exact
    pool.discard_if_present(exact.cache_id)
    pool.discard_if_present(exact.cache_id)
    assert free(pool) == 16


# -- eviction -------------------------------------------------------------------------------------------------------


def test_least_recently_used_cache_is_evicted(pool: Pool) -> None:
    old, middle, young = (store(pool, 16, first=i * 100) for i in range(3))
    pool.get(old.cache_id, SALT)
    with pool.allocate(8):
        pool.get(old.cache_id, SALT)
        pool.get(young.cache_id, SALT)
        with pytest.raises(CacheNotFound):
            pool.get(middle.cache_id, SALT)
    assert pool.stats.num_evictions == 1


def test_peek_does_not_mark_cache_as_used(pool: Pool) -> None:
    old, young = store(pool, 24, first=0), store(pool, 24, first=100)
    assert pool.peek(old.cache_id) == old
    with pool.allocate(10):
        pool.get(young.cache_id, SALT)
        with pytest.raises(CacheNotFound):
            pool.peek(old.cache_id)


def test_match_prefix_marks_cache_as_used(pool: Pool) -> None:
    old, young = store(pool, 24, first=0), store(pool, 24, first=100)
    pool.match_prefix(old.token_ids, SALT).release()
    with pool.allocate(10):
        pool.get(old.cache_id, SALT)
        with pytest.raises(CacheNotFound):
            pool.get(young.cache_id, SALT)


def test_blocks_in_use_are_not_evicted(pool: Pool) -> None:
    leased, held, idle = (store(pool, 16, first=i * 100) for i in range(3))
    lease = pool.lease(leased.cache_id, SALT, ttl_s=30)
    with pool.hold(held.cache_id, SALT):
        before = pool.arena.generations_of(leased.blocks + held.blocks)
        with pool.allocate(8):
            assert pool.arena.generations_of(leased.blocks + held.blocks) == before
            with pytest.raises(PoolFull, match="1 blocks requested; 0 of 16 are free.* 1 leases") as full:
                pool.allocate(1)
            assert isinstance(full.value, Overloaded) and full.value.status == 503
            assert full.value.retry_after_s == 5.0
        with pytest.raises(CacheNotFound):
            pool.get(idle.cache_id, SALT)
    pool.release(leased.cache_id, lease.lease_id)
    pool.allocate(16).release()


def test_impossible_allocation_evicts_nothing(pool: Pool) -> None:
    entry = store(pool, 16)
    with pool.allocate(8):
        with pytest.raises(PoolFull):
            pool.allocate(9)
        pool.get(entry.cache_id, SALT)


def test_allocation_without_eviction_takes_only_free_blocks(pool: Pool) -> None:
    entry = store(pool, 16)
    with pool.allocate(12, evict=False), pytest.raises(PoolFull, match="1 blocks .* and caches"):
        pool.allocate(1, evict=False)
    with pytest.raises(PoolFull):
        pool.store(range(64), random_kv(0, 64), SALT, ttl_s=60, evict=False)
    assert pool.get(entry.cache_id, SALT) == entry and free(pool) == 12


@pytest.mark.parametrize(("num_blocks", "error"), [(-1, InvalidRequest), (17, PoolFull)])
def test_allocation_beyond_pool_size_is_rejected(pool: Pool, num_blocks: int, error: type[KvrelayError]) -> None:
    with pytest.raises(error, match=f"{num_blocks} blocks requested; this pool has 16"):
        pool.allocate(num_blocks)


def test_allocated_blocks_are_zero(pool: Pool) -> None:
    for first in range(6):
        store(pool, 32, first=first * 100)
        with pool.allocate(12) as fresh:
            assert not pool.arena.data[list(fresh.blocks)].any()
            pool.scatter(fresh.blocks, random_kv(0, 48))


def test_only_overwritten_blocks_are_not_zeroed(pool: Pool) -> None:
    """A cache fills all its blocks but the end of the last, which must hold no earlier data."""
    old = store(pool, 64)
    before = pool.arena.generations_of(old.blocks)
    with pool.allocate(16, num_overwritten=15) as fresh:
        now = pool.arena.generations_of(fresh.blocks)
        assert not any(g & 1 for g in now) and min(now) > max(before)
        assert not pool.arena.data[fresh.blocks[-1]].any()
        pool.scatter(fresh.blocks, random_kv(0, 64))
    new = pool.store(range(500, 562), random_kv(0, 62), SALT, ttl_s=60)
    assert not pool.arena.data[new.blocks[-1], :, :, 2:].any()


def test_freed_blocks_change_generation_at_once_and_are_zeroed(pool: Pool) -> None:
    entry = store(pool, 10)
    before = pool.arena.generations_of(entry.blocks)
    pool.drop(entry.cache_id, SALT)
    assert all(now > then for now, then in zip(pool.arena.generations_of(entry.blocks), before, strict=True))
    deadline = time.monotonic() + 5
    while any(g & 1 for g in pool.arena.generations_of(entry.blocks)) and time.monotonic() < deadline:
        time.sleep(0.001)
    assert pool.arena.generations_of(entry.blocks) == [g + 2 for g in before]
    assert not pool.arena.data[list(entry.blocks)].any()


def test_release_is_idempotent(pool: Pool) -> None:
    first = pool.allocate(3)
    first.release()
    with pool.allocate(16):
        first.release()
        with pytest.raises(PoolFull):
            pool.allocate(1)


# -- leases ---------------------------------------------------------------------------------------------------------


def test_lease_outlives_its_cache_until_it_expires(pool: Pool, clock: ManualClock) -> None:
    entry = store(pool, 10)
    lease = pool.lease(entry.cache_id, SALT, ttl_s=10)
    assert pool.num_leases(entry.cache_id) == 1
    pool.drop(entry.cache_id, SALT)
    assert tuple(pool.arena.generations_of(entry.blocks)) == lease.generations
    clock.now += 9.9
    pool.sweep()
    assert free(pool) == 13
    clock.now += 0.2
    pool.sweep()
    assert free(pool) == 16 and pool.stats.num_leases == 0
    assert tuple(pool.arena.generations_of(entry.blocks)) != lease.generations


def test_allocate_ends_expired_leases(pool: Pool, clock: ManualClock) -> None:
    entry = store(pool, 64, ttl_s=1)
    pool.lease(entry.cache_id, SALT, ttl_s=10)
    with pytest.raises(PoolFull):
        pool.allocate(1)
    clock.now += 11
    pool.allocate(16).release()


def test_release_requires_matching_ids_and_is_idempotent(pool: Pool) -> None:
    entry, other = store(pool, 8), store(pool, 8, first=300)
    lease = pool.lease(entry.cache_id, SALT, ttl_s=10)
    pool.release(other.cache_id, lease.lease_id)
    pool.release(entry.cache_id, "lease-unknown")
    assert pool.num_leases(entry.cache_id) == 1
    pool.release(entry.cache_id, lease.lease_id)
    pool.release(entry.cache_id, lease.lease_id)
    assert pool.stats.num_leases == 0
    pool.get(entry.cache_id, SALT)


def test_number_of_leases_is_bounded(pool: Pool) -> None:
    entry = store(pool, 8)
    for _ in range(4):
        pool.lease(entry.cache_id, SALT, ttl_s=10)
    with pytest.raises(Overloaded, match="too many leases; the limit is 4"):
        pool.lease(entry.cache_id, SALT, ttl_s=10)


# -- writing, closing, threads --------------------------------------------------------------------------------------


def test_writing_marks_only_blocks_of_the_range(pool: Pool) -> None:
    with pool.allocate(4) as fresh:
        before = pool.arena.generations_of(fresh.blocks)
        with pool.writing(fresh.blocks, 5, 9):
            marks = [g & 1 for g in pool.arena.generations_of(fresh.blocks)]
        assert marks == [0, 1, 1, 0]
        assert pool.arena.generations_of(fresh.blocks) == [before[0], before[1] + 2, before[2] + 2, before[3]]


def test_writer_writes_several_layers(pool: Pool) -> None:
    kv = random_kv(2, 11)
    stack = torch.stack([torch.stack(kv.keys), torch.stack(kv.values)], dim=1).transpose(2, 3)  # (L, 2, T, H, D)
    with pool.allocate(3) as fresh:
        with pool.writing(fresh.blocks, 2, 11) as writer:
            writer.write(0, stack[:2])
            writer.write(2, stack[2:])
        assert_same(pool.gather(fresh.blocks, 2, 11), kv)


def test_closed_pool_raises_and_marks_every_block(pool: Pool) -> None:
    held = pool.allocate(2)
    generations = pool.arena.generations
    pool.close()
    held.release()
    assert (generations & 1).all()
    for call in (lambda: pool.allocate(1), lambda: pool.scatter(held.blocks, random_kv(0, 8))):
        with pytest.raises(WorkerUnavailable, match="the pool is closed"):
            call()


def test_repr_holds_no_tokens_or_salt(pool: Pool) -> None:
    entry = store(pool, 8, first=424_242)
    lease = pool.lease(entry.cache_id, SALT, ttl_s=1)
    for text in (repr(entry), repr(lease)):
        assert SALT not in text and "424242" not in text


def test_concurrent_threads_lose_no_block(pool: Pool) -> None:
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for turn in range(30):
                first = 1000 * seed + turn
                try:
                    entry = store(pool, 12, first=first)
                    with pool.hold(entry.cache_id, SALT) as held:
                        assert_same(pool.gather(held.blocks, 0, 12), random_kv(0, 12, seed=first))
                except (PoolFull, CacheNotFound):
                    continue
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    pool.sweep(float("inf"))
    assert free(pool) == 16


def test_pool_full_is_an_error_of_the_contract() -> None:
    assert issubclass(PoolFull, KvrelayError) and PoolFull.code == "pool_full"


# -- superseding mapped caches --------------------------------------------------------------------------------------


def test_supersede_replaces_a_whole_chain(pool: Pool, clock: ManualClock) -> None:
    below = put_mapped(pool, 12)
    with pool.hold(below.cache_id, SALT) as held:
        on_top = pool.store([*below.token_ids, 7, 8], random_kv(12, 14), SALT, ttl_s=60, prefix=held)
        other = pool.store([*below.token_ids[:8], 1], random_kv(8, 9), SALT, ttl_s=60, prefix=held)
    lease = pool.lease(below.cache_id, SALT, ttl_s=5)
    exact = pool.store(on_top.token_ids, random_kv(0, 14, seed=9), SALT, ttl_s=60)
    assert pool.supersede(exact) == 2
    for cache_id in (below.cache_id, on_top.cache_id):
        assert pool.get(cache_id, SALT, require_exact=True) == exact
        with pytest.raises(CacheMismatch, match="another tenant"):
            pool.get(cache_id, OTHER_SALT)
    assert pool.mapped_caches() == [other] and pool.supersede(exact) == 0
    assert tuple(pool.arena.generations_of(below.blocks)) == lease.generations  # kept until the lease ends
    pool.drop(other.cache_id, SALT)
    clock.now += 6
    pool.sweep()
    assert free(pool) == 16 - len(exact.blocks)
    pool.drop(below.cache_id, SALT)
    for cache_id in (below.cache_id, exact.cache_id):
        with pytest.raises(CacheNotFound):
            pool.get(cache_id, SALT)
    assert free(pool) == 16


def test_supersede_requires_exact_cache_of_same_tenant(pool: Pool) -> None:
    entry = put_mapped(pool, 12)
    assert pool.supersede(pool.store(entry.token_ids, random_kv(0, 12), OTHER_SALT, ttl_s=60)) == 0
    assert pool.supersede(pool.store(entry.token_ids[:8], random_kv(0, 8), SALT, ttl_s=60)) == 0
    assert pool.supersede(put_mapped(pool, 12)) == 0
    assert pool.get(entry.cache_id, SALT) == entry
