"""A second tier in host memory: an evicted cache comes back with its own content."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from tests.workers.pool.support import (
    FINGERPRINT,
    HOST_KINDS,
    LAYOUT,
    OTHER_SALT,
    SALT,
    ManualClock,
    assert_same,
    make_arena,
    random_kv,
)
from tests.workers.pool.test_pool_model import PoolModel, content
from workers.api.errors import CacheNotFound, InvalidRequest, PoolFull
from workers.digest import KVIdentity, block_chain
from workers.pool import pool as pool_module
from workers.pool import tiered
from workers.pool.arena import Arena
from workers.pool.blocks import block_bytes
from workers.pool.entries import CacheEntry, PoolStats, Span
from workers.pool.tiered import TieredPool

torch.set_num_threads(1)

BLOCK = block_bytes(LAYOUT)
Make = Callable[..., TieredPool]


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture(params=HOST_KINDS)
def make(request: pytest.FixtureRequest, tmp_path: Path, clock: ManualClock) -> Iterator[Make]:
    pools: list[TieredPool] = []

    def create(num_blocks: int = 4, num_slots: int = 8) -> TieredPool:
        arena = make_arena(request.param, tmp_path, num_blocks)
        pools.append(TieredPool(arena, FINGERPRINT, tier_bytes=num_slots * BLOCK, clock=clock))
        return pools[-1]

    yield create
    for pool in pools:
        pool.close()


def store(pool: TieredPool, num_tokens: int, first: int = 0, *, ttl_s: float = 600, salt: str = SALT) -> CacheEntry:
    return pool.store(range(first, first + num_tokens), random_kv(0, num_tokens, first), salt, ttl_s=ttl_s)


def recall(pool: TieredPool, entry: CacheEntry) -> bool:
    """Return whether the cache came back."""
    before = pool.stats.num_recalls
    for _ in pool.recall(entry.cache_id):
        pass
    return pool.stats.num_recalls > before


def assert_content(pool: TieredPool, entry: CacheEntry, seed: int) -> None:
    with pool.hold(entry.cache_id, SALT) as held:
        assert_same(pool.gather(held.blocks, 0, entry.num_tokens), random_kv(0, entry.num_tokens, seed))


def assert_gone(pool: TieredPool, entry: CacheEntry) -> None:
    for find in (pool.get, pool.hold):
        with pytest.raises(CacheNotFound):
            find(entry.cache_id, SALT)


def test_evicted_cache_is_recalled_unchanged(make: Make) -> None:
    pool = make()
    one, two = store(pool, 14, first=100), store(pool, 14, first=200)
    assert_gone(pool, one)
    assert pool.find_evicted((), SALT, one.cache_id) == one.cache_id
    assert recall(pool, one)
    assert_content(pool, one, seed=100)
    again = pool.get(one.cache_id, SALT)
    assert (again.digest, again.expires_at, again.token_ids) == (one.digest, one.expires_at, one.token_ids)
    assert_gone(pool, two)
    assert (pool.stats.num_evictions, pool.stats.num_recalls, pool.stats.tier_used_blocks) == (2, 1, 4)


def test_longer_prefix_in_second_tier_is_found_and_recalled(make: Make) -> None:
    pool = make()
    one = store(pool, 14)
    store(pool, 14, first=200)
    prompt = [*range(13), 77, 78]
    assert not pool.match_prefix(prompt, SALT).blocks
    assert pool.find_evicted(prompt, SALT) == one.cache_id and recall(pool, one)
    with pool.match_prefix(prompt, SALT) as found:
        assert_same(pool.gather(found.blocks, 0, 12), random_kv(0, 14).slice(0, 12))
    assert pool.find_evicted(prompt, SALT) is None  # the tier has nothing better


def test_evicted_cache_of_other_tenant_or_mapped_is_not_found_by_tokens(make: Make) -> None:
    pool = make()
    store(pool, 14, salt=OTHER_SALT)
    with pool.allocate(4) as fresh:
        mapped = pool.put(fresh.blocks, range(14), SALT, ttl_s=60, provenance="mapped:b", mapped=Span(4, 14))
    store(pool, 14, first=300)
    assert pool.find_evicted(range(14), SALT) is None
    assert pool.find_evicted((), OTHER_SALT, mapped.cache_id) is None
    assert pool.find_evicted((), SALT, mapped.cache_id) == mapped.cache_id and recall(pool, mapped)
    assert pool.get(mapped.cache_id, SALT).mapped == Span(4, 14)
    assert not pool.match_prefix(range(14), SALT).blocks


def test_bar_removes_caches_from_both_tiers(make: Make) -> None:
    pool = make()

    def mapped(name: str) -> CacheEntry:
        with pool.allocate(2) as fresh:
            return pool.put(fresh.blocks, range(8), SALT, ttl_s=60, provenance=f"mapped:{name}", mapped=Span(4, 8))

    in_tier, other_in_tier, in_pool, other_in_pool = (mapped(name) for name in ("bad", "good", "bad", "good"))
    assert pool.find_evicted((), SALT, in_tier.cache_id) and pool.get(in_pool.cache_id, SALT)
    pool.bar("mapped:bad")
    for gone in (in_tier, in_pool):
        assert_gone(pool, gone)
        assert not recall(pool, gone)
    assert pool.get(other_in_pool.cache_id, SALT) and recall(pool, other_in_tier)


def test_deleted_or_expired_cache_is_not_recalled(make: Make, clock: ManualClock) -> None:
    pool = make(num_slots=12)
    dropped, expired = store(pool, 14, ttl_s=600), store(pool, 14, first=100, ttl_s=5)
    store(pool, 14, first=200)
    pool.discard_if_present(dropped.cache_id)
    clock.now += 6
    for entry in (dropped, expired):
        assert pool.find_evicted((), SALT, entry.cache_id) is None
        assert not recall(pool, entry)
        assert_gone(pool, entry)
    with pytest.raises(CacheNotFound):
        pool.discard(dropped.cache_id)


def test_tier_memory_is_bounded_and_cleared(make: Make) -> None:
    pool = make(num_slots=8)
    entries = [store(pool, 16, first=100 * i) for i in range(4)]
    assert pool.find_evicted((), SALT, entries[0].cache_id) is None  # evicted for the two after it
    assert [pool.find_evicted((), SALT, entry.cache_id) for entry in entries[1:3]] == [e.cache_id for e in entries[1:3]]
    for entry in entries[1:3]:
        pool.discard(entry.cache_id)
    end = time.monotonic() + 5
    while pool._tier.data.any() and time.monotonic() < end:
        time.sleep(0.005)
    assert not pool._tier.data.any() and pool.stats.tier_used_blocks == 0


def test_shared_blocks_are_stored_once_in_tier(make: Make) -> None:
    pool = make(num_blocks=6, num_slots=16)
    one = store(pool, 16)
    with pool.hold(one.cache_id, SALT) as held:
        two = pool.store([*range(16), 1, 2], random_kv(16, 18, 5), SALT, ttl_s=600, prefix=held)
    store(pool, 24, first=500)
    assert pool.stats.tier_used_blocks == 5  # not 4 + 5
    assert recall(pool, two) and recall(pool, one)
    assert pool.get(two.cache_id, SALT).blocks[:4] == pool.get(one.cache_id, SALT).blocks
    assert_content(pool, one, seed=0)


def test_recall_from_full_tier_keeps_the_recalled_cache(make: Make) -> None:
    pool = make(num_blocks=4, num_slots=4)
    one = store(pool, 16, first=100)
    store(pool, 16, first=200)
    assert recall(pool, one)
    assert_content(pool, one, seed=100)


def test_recall_into_full_pool_does_nothing(make: Make) -> None:
    pool = make()
    one = store(pool, 14)
    with pool.allocate(4):
        assert not recall(pool, one)
        with pytest.raises(PoolFull):
            pool.allocate(1)
    assert recall(pool, one)
    assert_content(pool, one, seed=0)


def test_closed_recall_changes_nothing(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiered, "RECALL_BYTES", BLOCK)
    pool = make()
    one, _ = store(pool, 14, first=100), store(pool, 14, first=200)
    steps = pool.recall(one.cache_id)
    next(steps)
    assert not recall(pool, one)  # it is being recalled
    steps.close()
    assert pool.find_evicted((), SALT, one.cache_id) == one.cache_id
    assert recall(pool, one)
    assert_content(pool, one, seed=100)


def test_hashing_does_not_hold_the_lock(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = make()
    store(pool, 14, first=100)

    def hash_blocks(token_ids: Sequence[int], identity: KVIdentity) -> list[bytes]:
        stats: list[PoolStats] = []
        thread = threading.Thread(target=lambda: stats.append(pool.stats))
        thread.start()
        thread.join(5)
        assert stats, "the pool is locked"
        return block_chain(token_ids, identity)

    monkeypatch.setattr(pool_module, "block_chain", hash_blocks)
    store(pool, 14, first=200)  # evicts the first one
    assert pool.find_evicted(range(100, 114), SALT) is not None


def test_supersede_replaces_caches_in_tier(make: Make) -> None:
    pool = make(num_slots=16)
    with pool.allocate(2) as fresh:
        mapped = pool.put(fresh.blocks, range(8), SALT, ttl_s=60, provenance="mapped:b", mapped=Span(4, 8))
    other, tip = store(pool, 8, first=300), None
    with pool.allocate(2) as fresh:
        tip = pool.put(fresh.blocks, range(7), SALT, ttl_s=60, provenance="mapped:b", mapped=Span(4, 7))
    assert pool.find_evicted((), SALT, mapped.cache_id)
    pool.discard(other.cache_id)
    exact = store(pool, 8)
    assert pool.supersede(exact, tip=tip) == 2
    assert pool.get(mapped.cache_id, SALT, require_exact=True).cache_id == exact.cache_id
    assert pool.find_evicted((), SALT, mapped.cache_id) is None


def test_tier_budget_below_one_block_is_rejected(tmp_path: Path) -> None:
    arena = make_arena("inproc", tmp_path)
    with pytest.raises(InvalidRequest, match=f"host_tier_bytes is {BLOCK - 1}; one block of this layout needs {BLOCK}"):
        TieredPool(arena, FINGERPRINT, tier_bytes=BLOCK - 1)
    arena.close()


class TieredModel(PoolModel):
    """The model of a pool, whose evicted caches may be recalled at any time."""

    def make_pool(self, arena: Arena) -> TieredPool:
        self.evicted: dict[str, tuple[CacheEntry, int]] = {}
        return TieredPool(arena, FINGERPRINT, tier_bytes=7 * BLOCK, clock=self.clock)

    def num_superseded_in_tier(self, pattern: int, num_tokens: int) -> int:
        replaced = [
            entry
            for entry, of in self.evicted.values()
            if of == pattern and not entry.is_exact and entry.num_tokens <= num_tokens
        ]
        known = [entry.cache_id for entry in replaced if self.pool.find_evicted((), SALT, entry.cache_id)]
        for cache_id in known:
            del self.evicted[cache_id]
        return len(known)

    def forget_evicted(self) -> None:
        self.evicted |= {cache_id: kept for cache_id, kept in self.caches.items() if not self.has(cache_id)}
        super().forget_evicted()

    @precondition(lambda self: self.evicted)
    @rule(data=st.data())
    def recall(self, data: st.DataObject) -> None:
        self.expire()
        cache_id = self.pick(data, self.evicted)
        old, pattern = self.evicted.pop(cache_id)
        assert isinstance(self.pool, TieredPool)
        came_back = recall(self.pool, old)
        self.forget_evicted()
        if not came_back:
            return
        entry = self.pool.get(cache_id, SALT)
        assert entry.expires_at > self.clock() and entry.token_ids == old.token_ids
        assert_same(self.pool.gather(entry.blocks, 0, entry.num_tokens), content(pattern, 0, entry.num_tokens))
        self.caches[cache_id] = (entry, pattern)


TieredModel.TestCase.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
TestTieredModel = TieredModel.TestCase
