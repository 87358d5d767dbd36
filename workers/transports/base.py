"""`Reader`: another worker's pool, opened for reading. `Transport`: opens them.

A read is a copy between two looks at the generations:

    look ── all even, all as in the ticket ──► copy ──► look again ── unchanged ──► the copy is one content
              otherwise CacheStale                          otherwise CacheStale, and the copy is worthless

A new transport is one file with an `open`, and one line in the registry.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from torch import Tensor

from mappers.cache import KVCache
from workers.api.errors import CacheStale, TransferFailed
from workers.api.schemas import KVLayout, PoolExport
from workers.pool.blocks import block_shape, check_blocks, copy_out, empty_cache
from workers.pool.segment import Generations


class Reader:
    """A peer's blocks and generations, mapped read-only."""

    def __init__(self, export: PoolExport, layout: KVLayout, data: Tensor, generations: Generations):
        self.export = export
        self.layout = layout
        self._data = data  # (num_blocks, L, 2, block_tokens, H, D)
        self._generations = generations

    def read(self, blocks: Sequence[int], generations: Sequence[int], begin: int, end: int) -> KVCache:
        """Tokens `[begin, end)` of the sequence in `blocks`, copied out in the pool's dtype, on the pool's device.

        `generations` are the ticket's, one a block. `CacheStale` if a block was freed or written since, or while it was
        copied; `TransferFailed` for blocks that the pool lacks.
        """
        check_blocks(blocks, self.export.num_blocks, TransferFailed)
        size = self.layout.block_tokens
        touched = slice(begin // size, -(-end // size))
        self._check(blocks[touched], generations[touched])
        copy = empty_cache(self.layout, begin, end, self._data.device)
        copy_out(self._data, blocks, copy)
        self._synchronize()
        self._check(blocks[touched], generations[touched])
        return copy

    def alive(self) -> bool:
        """Whether the pool's owner still runs."""
        return True

    def close(self) -> None:  # noqa: B027 - what holds nothing has nothing to give back
        """Give up the mapping. Idempotent."""

    def _synchronize(self) -> None:
        """Wait until the copy is done."""

    def _check(self, blocks: Sequence[int], generations: Sequence[int]) -> None:
        expected = np.asarray(generations, dtype=np.int64)
        found = self._generations[np.asarray(blocks, dtype=np.int64)]
        wrong = np.flatnonzero((found != expected) | (found & 1).astype(bool))
        if wrong.size:
            at = int(wrong[0])
            raise CacheStale(
                f"block {blocks[at]} is at generation {found[at]}, its ticket says {expected[at]}: "
                "it was written or freed since"
            )


class Transport(ABC):
    """Opens the pools of one kind."""

    kind: ClassVar[str]

    @abstractmethod
    def open(self, export: PoolExport, layout: KVLayout) -> Reader:
        """Map the pool. `CacheStale` when it is gone or of another epoch, `TransferFailed` when it can't be read from
        here."""


def check_shape(data_shape: Sequence[int], num_blocks: int, layout: KVLayout) -> None:
    if tuple(data_shape) != (num_blocks, *block_shape(layout)):
        raise TransferFailed(f"the pool has shape {tuple(data_shape)}; its ticket says {layout} x {num_blocks} blocks")
