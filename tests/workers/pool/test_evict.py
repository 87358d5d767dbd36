from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from workers.pool.entries import CacheEntry
from workers.pool.tables import choose_victims

NUM_BLOCKS = 8


def cache(name: str, *blocks: int) -> CacheEntry:
    return CacheEntry(name, (0,) * len(blocks), blocks, "", "", 0.0, 0.0)


def users(entries: list[CacheEntry], *others: int) -> list[int]:
    count = Counter(block for entry in entries for block in entry.blocks)
    count.update(others)
    return [count[block] for block in range(NUM_BLOCKS)]


def victims(entries: list[CacheEntry], needed: int, *others: int) -> str | None:
    chosen = choose_victims(entries, users(entries, *others), needed)
    return None if chosen is None else "".join(entry.cache_id for entry in chosen)


def test_oldest_are_evicted_first_and_only_as_needed() -> None:
    entries = [cache("a", 0, 1), cache("b", 2, 3), cache("c", 4)]
    assert victims(entries, 0) == ""
    assert victims(entries, 2) == "a"
    assert victims(entries, 3) == "ab"
    assert victims(entries, 5) == "abc"
    assert victims(entries, 6) is None


def test_block_in_use_is_never_freed() -> None:
    entries = [cache("a", 0, 1), cache("b", 2, 3)]
    assert victims(entries, 2, 0, 1) == "b"
    assert victims(entries, 3, 0) == "ab"
    assert victims(entries, 4, 0) is None


def test_shared_block_is_freed_with_last_cache() -> None:
    entries = [cache("a", 0, 1), cache("b", 0, 1, 2)]
    assert victims(entries, 1) == "b"
    assert victims(entries, 2) == "ab"


entries_of = st.lists(st.lists(st.integers(0, NUM_BLOCKS - 1), min_size=1, unique=True), max_size=5)


@given(entries_of, st.lists(st.integers(0, NUM_BLOCKS - 1), max_size=3), st.integers(0, NUM_BLOCKS))
def test_victims_free_enough_and_none_is_superfluous(blocks: list[list[int]], others: list[int], needed: int) -> None:
    entries = [cache(str(i), *owned) for i, owned in enumerate(blocks)]
    chosen = choose_victims(entries, users(entries, *others), needed)
    used = {block for owned in blocks for block in owned}
    if chosen is None:
        assert len(used - set(others)) < needed
        return
    left = users([entry for entry in entries if entry not in chosen], *others)
    assert sum(not left[block] for block in used) >= needed
    for spared in chosen:  # each victim is necessary
        left = users([entry for entry in entries if entry not in chosen or entry is spared], *others)
        assert sum(not left[block] for block in used) < needed
