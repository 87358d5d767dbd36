"""`BlockLedger`: which blocks are free, which are used, and by how many. Knows no tokens and no memory, takes no lock.

    clean ──take──► used (1 or more users) ──last drop──► dirty ──next_dirty──► clearing ──cleaned──► clean
                                                            └────take (the taker clears it)───► used

`PrefixIndex`: exact prefixes by the chain hash of their tokens, block by block.

Only blocks that the model computed itself over blocks that it computed itself enter; what came from a mapper, or was
read over something that did, is found by its cache id alone. An entry goes with its block, so the index never outgrows
the pool.

What to evict. A plain function from the caches' order and use to a list of victims."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from workers.pool.entries import CacheEntry


class BlockLedger:
    def __init__(self, num_blocks: int):
        self.users = [0] * num_blocks
        self._clean = list(range(num_blocks))  # a heap: low ids first keeps a cache's blocks in a row
        self._dirty: list[int] = []
        self._num_clearing = 0

    @property
    def num_ready(self) -> int:
        """Blocks that `take` can give at once."""
        return len(self._clean) + len(self._dirty)

    @property
    def num_free(self) -> int:
        return self.num_ready + self._num_clearing

    @property
    def num_clearing(self) -> int:
        return self._num_clearing

    @property
    def has_dirty(self) -> bool:
        return bool(self._dirty)

    def take(self, num_blocks: int) -> tuple[list[int], list[int]]:
        """`(blocks, those of them that must be cleared first)`, each with one user."""
        assert num_blocks <= self.num_ready
        clean = [heapq.heappop(self._clean) for _ in range(min(num_blocks, len(self._clean)))]
        dirty = self._dirty[: num_blocks - len(clean)]
        del self._dirty[: len(dirty)]
        blocks = sorted(clean + dirty)
        for block in blocks:
            self.users[block] = 1
        return blocks, dirty

    def share(self, blocks: Iterable[int]) -> None:
        """One user more for each; only a block that is used can be shared."""
        for block in blocks:
            assert self.users[block] > 0, "a block is shared by those who hold it"
            self.users[block] += 1

    def drop(self, blocks: Sequence[int]) -> list[int]:
        """One user less for each; the blocks that have none left are dirty now and are returned."""
        freed = []
        for block in blocks:
            assert self.users[block] > 0, "a block is released once by each user"
            self.users[block] -= 1
            if not self.users[block]:
                freed.append(block)
        self._dirty.extend(freed)
        return freed

    def next_dirty(self, limit: int) -> list[int]:
        """Up to `limit` dirty blocks for the caller to clear; `cleaned` gives them back."""
        batch, self._dirty = self._dirty[:limit], self._dirty[limit:]
        self._num_clearing += len(batch)
        return batch

    def cleaned(self, blocks: Sequence[int]) -> None:
        self._num_clearing -= len(blocks)
        for block in blocks:
            heapq.heappush(self._clean, block)


@dataclass(frozen=True)
class _IndexEntry:
    key: bytes
    cache_id: str


class PrefixIndex:
    def __init__(self) -> None:
        self._blocks_by_key: dict[bytes, list[int]] = {}  # equal contents, the newest last
        self._by_block: dict[int, _IndexEntry] = {}

    def __len__(self) -> int:
        return len(self._by_block)

    def add(self, keys: Sequence[bytes], blocks: Sequence[int], cache_id: str) -> None:
        """Key i names block i, which that cache uses."""
        for key, block in zip(keys, blocks, strict=False):
            if block not in self._by_block:
                self._blocks_by_key.setdefault(key, []).append(block)
            self._by_block[block] = _IndexEntry(key, cache_id)

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """The blocks of the longest known prefix."""
        blocks = []
        for key in keys:
            if key not in self._blocks_by_key:
                break
            blocks.append(self._blocks_by_key[key][-1])
        return blocks

    def cache_of(self, block: int) -> str:
        """The cache that last brought this block in."""
        return self._by_block[block].cache_id

    def forget(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            indexed = self._by_block.pop(block, None)
            if indexed is None:
                continue
            equal = self._blocks_by_key[indexed.key]
            equal.remove(block)
            if not equal:
                del self._blocks_by_key[indexed.key]


def choose_victims(entries: Iterable[CacheEntry], users: Sequence[int], needed: int) -> list[CacheEntry] | None:
    """The caches to drop, least recently used first, so that `needed` blocks come free; None if no choice frees them.

    `entries` come in that order. `users[b]` counts who uses block b, each cache that holds it being one: a block comes
    free when its last user goes, so a block that a lease or a running request also uses never does. A cache whose going
    turns out to be unnecessary (its blocks are shared, or pinned) is spared.
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
    return [entry for entry in reversed(chosen) if not _spared(entry, freed, needed)][::-1]


def _spared(entry: CacheEntry, freed: set[int], needed: int) -> bool:
    """Whether enough comes free without this cache; if so, `freed` loses its blocks."""
    kept = freed.intersection(entry.blocks)
    if len(freed) - len(kept) < needed:
        return False
    freed -= kept
    return True
