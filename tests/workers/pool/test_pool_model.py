"""The pool against a model of dictionaries, under random operations: it holds what the model holds, every cache reads
back its own content, and no block is lost or used twice."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mappers.cache import KVCache
from tests.workers.pool.support import FINGERPRINT, LAYOUT, SALT, ManualClock, assert_same, random_kv
from workers.api.errors import CacheNotFound, PoolFull
from workers.pool import new_epoch
from workers.pool.arena import Arena, HeapArena
from workers.pool.blocks import blocks_for
from workers.pool.entries import CacheEntry, Hold, Lease, Span
from workers.pool.pool import Pool

NUM_BLOCKS = 10
SIZE = LAYOUT.block_tokens
PATTERNS = 3  # few different token sequences, so that prefixes are shared


def tokens(pattern: int, num_tokens: int) -> list[int]:
    return [pattern * 1000 + i for i in range(num_tokens)]


def content(pattern: int, begin: int, end: int) -> KVCache:
    """Return the KV of a pattern's tokens, which depends on pattern and position only, as a model's does."""
    return random_kv(0, NUM_BLOCKS * SIZE, seed=pattern).slice(begin, end)


class PoolModel(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.clock = ManualClock()
        self.pool = self.make_pool(HeapArena(LAYOUT, NUM_BLOCKS, new_epoch()))
        self.caches: dict[str, tuple[CacheEntry, int]] = {}  # each with its pattern
        self.leases: dict[str, tuple[Lease, int]] = {}
        self.holds: list[Hold] = []

    def make_pool(self, arena: Arena) -> Pool:
        return Pool(arena, FINGERPRINT, clock=self.clock)

    def num_superseded_in_tier(self, pattern: int, num_tokens: int) -> int:
        """Return the number of evicted mapped caches of the pattern that are at most that long."""
        return 0

    def teardown(self) -> None:
        for hold in self.holds:
            hold.release()
        self.pool.sweep(float("inf"))
        stats = self.pool.stats
        assert (stats.free_blocks, stats.num_indexed) == (NUM_BLOCKS, 0)
        with self.pool.allocate(NUM_BLOCKS):  # freed blocks were cleared
            assert not self.pool.arena.data.any()
        self.pool.close()

    def expire(self) -> None:
        now = self.clock()
        self.caches = {k: v for k, v in self.caches.items() if v[0].expires_at > now}
        self.leases = {k: v for k, v in self.leases.items() if v[0].expires_at > now}

    def pick(self, data: st.DataObject, table: dict[str, Any]) -> str:
        """Pick an id by its position, since ids differ from run to run."""
        return list(table)[data.draw(st.integers(0, len(table) - 1))]

    def forget_evicted(self) -> None:
        """Remove what the pool has evicted: which caches it chooses is tested elsewhere."""
        self.caches = {cache_id: kept for cache_id, kept in self.caches.items() if self.has(cache_id)}

    def has(self, cache_id: str) -> bool:
        try:
            self.pool.get(cache_id, SALT)
        except CacheNotFound:
            return False
        return True

    @rule(pattern=st.integers(0, PATTERNS - 1), num_tokens=st.integers(1, 20), ttl_s=st.integers(1, 30))
    def store(self, pattern: int, num_tokens: int, ttl_s: int) -> None:
        self.expire()
        ids = tokens(pattern, num_tokens)
        with self.pool.match_prefix(ids, SALT) as prefix:
            kv = content(pattern, prefix.num_tokens, num_tokens)
            try:
                entry = self.pool.store(ids, kv, SALT, ttl_s=ttl_s, prefix=prefix)
            except PoolFull:
                return
            assert entry.blocks[: len(prefix.blocks)] == prefix.blocks
        self.forget_evicted()
        self.caches[entry.cache_id] = (entry, pattern)

    @rule(pattern=st.integers(0, PATTERNS - 1), num_tokens=st.integers(2, 12))
    def put_mapped(self, pattern: int, num_tokens: int) -> None:
        self.expire()
        try:
            with self.pool.allocate(blocks_for(num_tokens, SIZE)) as fresh:
                self.pool.scatter(fresh.blocks, content(pattern, 0, num_tokens))
                entry = self.pool.put(
                    fresh.blocks, tokens(pattern, num_tokens), SALT, ttl_s=20, provenance="mapped:b",
                    mapped=Span(1, num_tokens),
                )  # fmt: skip
        except PoolFull:
            return
        self.forget_evicted()
        self.caches[entry.cache_id] = (entry, pattern)

    @precondition(lambda self: self.caches)
    @rule(data=st.data(), more=st.integers(0, 6))
    def extend(self, data: st.DataObject, more: int) -> None:
        self.expire()
        if not self.caches:
            return
        cache_id = self.pick(data, self.caches)
        old, pattern = self.caches[cache_id]
        cut = data.draw(st.integers(1, old.num_tokens))
        with self.pool.hold(cache_id, SALT) as held:
            try:
                new = self.pool.store(
                    tokens(pattern, cut + more), content(pattern, cut, cut + more), SALT, ttl_s=20, prefix=held
                )
            except PoolFull:
                return
            finally:
                self.forget_evicted()
        assert new.provenance == old.provenance
        self.caches[new.cache_id] = (new, pattern)

    @precondition(lambda self: self.caches)
    @rule(data=st.data())
    def upgrade(self, data: st.DataObject) -> None:
        """Prefill any cache's tokens natively: the exact cache replaces the mapped ones below it."""
        self.expire()
        if not self.caches:
            return
        tip, pattern = self.caches[self.pick(data, self.caches)]
        try:
            exact = self.pool.store(tip.token_ids, content(pattern, 0, tip.num_tokens), SALT, ttl_s=20)
        except PoolFull:
            return
        self.forget_evicted()
        replaced = [
            entry
            for entry, of in self.caches.values()
            if of == pattern and not entry.is_exact and entry.num_tokens <= tip.num_tokens
        ]
        num_in_tier = self.num_superseded_in_tier(pattern, tip.num_tokens)
        assert self.pool.supersede(exact) == len(replaced) + (num_in_tier if replaced else 0)
        for entry in replaced:
            del self.caches[entry.cache_id]
            assert self.pool.get(entry.cache_id, SALT, require_exact=True) == exact
        self.caches[exact.cache_id] = (exact, pattern)

    @precondition(lambda self: self.caches)
    @rule(data=st.data(), ttl_s=st.integers(1, 30))
    def lease(self, data: st.DataObject, ttl_s: int) -> None:
        self.expire()
        if not self.caches:
            return
        cache_id = self.pick(data, self.caches)
        lease = self.pool.lease(cache_id, SALT, ttl_s=ttl_s)
        self.leases[lease.lease_id] = (lease, self.caches[cache_id][1])

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease, _ = self.leases.pop(self.pick(data, self.leases))
        self.pool.release(lease.entry.cache_id, lease.lease_id)

    @rule(num_blocks=st.integers(0, NUM_BLOCKS), num_overwritten=st.integers(0, NUM_BLOCKS))
    def allocate(self, num_blocks: int, num_overwritten: int) -> None:
        self.expire()
        pinned = {b for lease, _ in self.leases.values() for b in lease.entry.blocks}
        pinned |= {b for hold in self.holds for b in hold.blocks}
        try:
            hold = self.pool.allocate(num_blocks, num_overwritten=num_overwritten)
        except PoolFull:
            assert num_blocks > NUM_BLOCKS - len(pinned)
            return
        assert num_blocks <= NUM_BLOCKS - len(pinned)
        assert not pinned & set(hold.blocks)
        assert not self.pool.arena.data[list(hold.blocks[num_overwritten:])].any()
        self.pool.scatter(hold.blocks, random_kv(0, num_blocks * SIZE, seed=99))
        self.holds.append(hold)
        self.forget_evicted()

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def release_hold(self, data: st.DataObject) -> None:
        self.holds.pop(data.draw(st.integers(0, len(self.holds) - 1))).release()

    @precondition(lambda self: self.caches)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        self.expire()
        if self.caches:
            cache_id = self.pick(data, self.caches)
            del self.caches[cache_id]
            self.pool.drop(cache_id, SALT)

    @rule(seconds=st.integers(1, 15))
    def wait(self, seconds: int) -> None:
        self.clock.now += seconds
        self.pool.sweep()

    @rule(pattern=st.integers(0, PATTERNS - 1))
    def longest_exact_prefix(self, pattern: int) -> None:
        self.expire()
        ids = tokens(pattern, NUM_BLOCKS * SIZE)
        known = [e.num_tokens // SIZE * SIZE for e, p in self.caches.values() if p == pattern and e.is_exact]
        with self.pool.match_prefix(ids, SALT) as match:
            assert match.num_tokens >= max(known, default=0)
            if match.num_tokens:
                assert_same(self.pool.gather(match.blocks, 0, match.num_tokens), content(pattern, 0, match.num_tokens))

    @invariant()
    def caches_and_leases_read_back(self) -> None:
        self.expire()
        self.pool.sweep()
        for entry, pattern in self.caches.values():
            assert_same(self.pool.gather(entry.blocks, 0, entry.num_tokens), content(pattern, 0, entry.num_tokens))
        for lease, pattern in self.leases.values():
            assert tuple(self.pool.arena.generations_of(lease.entry.blocks)) == lease.generations
            assert_same(
                self.pool.gather(lease.entry.blocks, 0, lease.entry.num_tokens),
                content(pattern, 0, lease.entry.num_tokens),
            )

    @invariant()
    def each_block_is_counted_once(self) -> None:
        owners: Counter[int] = Counter()
        for users in (
            (entry.blocks for entry, _ in self.caches.values()),
            (lease.entry.blocks for lease, _ in self.leases.values()),
            (hold.blocks for hold in self.holds),
        ):
            owners.update(block for blocks in users for block in blocks)
        assert self.pool.stats.used_blocks == len(owners)
        assert self.pool.stats.num_indexed <= len(owners)
        assert self.pool.stats.num_caches == len(self.caches)
        assert self.pool.stats.num_leases == len(self.leases)


PoolModel.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestPoolModel = PoolModel.TestCase
