"""The tables of a pool: free and used blocks, cached prefixes, and the choice of caches to evict.

They know no memory and take no lock.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from workers.pool.entries import CacheEntry


class BlockLedger:
    """Counts the users of each block.

    clean ──take──► used (1 or more users) ──last drop──► dirty ──next_dirty──► clearing ──cleaned──► clean
                                                            └────take (the caller clears it)────► used
    """

    def __init__(self, num_blocks: int):
        self.users = [0] * num_blocks
        self._clean = list(range(num_blocks))  # a heap: low ids first keeps a cache's blocks contiguous
        self._dirty: list[int] = []
        self.num_clearing = 0

    @property
    def num_ready(self) -> int:
        """Number of blocks that `take` can return at once."""
        return len(self._clean) + len(self._dirty)

    @property
    def num_free(self) -> int:
        return self.num_ready + self.num_clearing

    @property
    def has_dirty(self) -> bool:
        return bool(self._dirty)

    def take(self, num_blocks: int) -> tuple[list[int], list[int]]:
        """Return blocks with one user each, and those of them that must be cleared first."""
        assert num_blocks <= self.num_ready
        clean = [heapq.heappop(self._clean) for _ in range(min(num_blocks, len(self._clean)))]
        dirty = self._dirty[: num_blocks - len(clean)]
        del self._dirty[: len(dirty)]
        blocks = sorted(clean + dirty)
        for block in blocks:
            self.users[block] = 1
        return blocks, dirty

    def share(self, blocks: Iterable[int]) -> None:
        """Add a user to each block. The blocks must be in use."""
        for block in blocks:
            assert self.users[block] > 0, "only a block in use can be shared"
            self.users[block] += 1

    def drop(self, blocks: Sequence[int]) -> list[int]:
        """Remove a user from each block. Returns the blocks without users, which are dirty now."""
        freed = []
        for block in blocks:
            assert self.users[block] > 0, "each user releases a block once"
            self.users[block] -= 1
            if not self.users[block]:
                freed.append(block)
        self._dirty.extend(freed)
        return freed

    def next_dirty(self, limit: int) -> list[int]:
        """Return up to `limit` dirty blocks for the caller to clear. It calls `cleaned` afterwards."""
        batch, self._dirty = self._dirty[:limit], self._dirty[limit:]
        self.num_clearing += len(batch)
        return batch

    def cleaned(self, blocks: Sequence[int]) -> None:
        self.num_clearing -= len(blocks)
        for block in blocks:
            heapq.heappush(self._clean, block)


@dataclass(frozen=True)
class _IndexEntry:
    key: bytes
    cache_id: str


class PrefixIndex:
    """Finds exact prefixes by the chain hash of their tokens, block by block.

    It holds only blocks that the model computed itself over blocks that it computed itself. KV that came from a mapper,
    or was computed over such KV, is found by its cache id alone. An entry is removed with its block, so the index never
    outgrows the pool.
    """

    def __init__(self) -> None:
        self._blocks_by_key: dict[bytes, list[int]] = {}  # equal contents, the newest last
        self._by_block: dict[int, _IndexEntry] = {}

    def __len__(self) -> int:
        return len(self._by_block)

    def add(self, keys: Sequence[bytes], blocks: Sequence[int], cache_id: str) -> None:
        """Index a cache's full blocks: key i names block i."""
        for key, block in zip(keys, blocks, strict=False):
            if block not in self._by_block:
                self._blocks_by_key.setdefault(key, []).append(block)
            self._by_block[block] = _IndexEntry(key, cache_id)

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """Return the blocks of the longest known prefix."""
        blocks = []
        for key in keys:
            if key not in self._blocks_by_key:
                break
            blocks.append(self._blocks_by_key[key][-1])
        return blocks

    def cache_of(self, block: int) -> str:
        """Return the id of the cache that indexed this block last."""
        return self._by_block[block].cache_id

    def forget(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            entry = self._by_block.pop(block, None)
            if entry is None:
                continue
            equal = self._blocks_by_key[entry.key]
            equal.remove(block)
            if not equal:
                del self._blocks_by_key[entry.key]


def choose_victims(entries: Iterable[CacheEntry], users: Sequence[int], needed: int) -> list[CacheEntry] | None:
    """Choose the caches to evict so that `needed` blocks become free. Returns None if that is impossible.

    `entries` come least recently used first, and are evicted in that order. `users[b]` counts the users of block b,
    each cache that holds it being one. A block becomes free with its last user, so one that a lease or a running
    request also uses never does. A cache whose eviction turns out to free nothing needed is kept.
    """
    dropped: Counter[int] = Counter()
    freed: set[int] = set()
    chosen: list[CacheEntry] = []
    for entry in entries:
        if len(freed) >= needed:
            break
        dropped.update(entry.blocks)
        freed.update(block for block in entry.blocks if dropped[block] == users[block])
        chosen.append(entry)
    if len(freed) < needed:
        return None
    victims = []
    for entry in reversed(chosen):
        kept = freed.intersection(entry.blocks)
        if len(freed) - len(kept) < needed:
            victims.append(entry)
        else:
            freed -= kept
    return victims[::-1]
