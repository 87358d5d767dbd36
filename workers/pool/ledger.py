"""`BlockLedger`: which blocks are free, which are used, and by how many. Knows no tokens and no memory, takes no lock.

    clean ──take──► used (1 or more users) ──last drop──► dirty ──next_dirty──► clearing ──cleaned──► clean
                                                            └────take (the taker clears it)───► used
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence


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
