"""`PoolMemory`: copies between the blocks of a pool and whole tensors. Knows no cache, no tenant, no lock.

The caller holds the blocks, and alone writes to those that it writes to; both hold of what `Pool` gives out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from mappers.cache import KVCache
from workers.api.errors import InvalidRequest, WorkerUnavailable
from workers.api.schemas import KVLayout, PoolExport
from workers.pool.arena import Arena
from workers.pool.blocks import blocks_for, check_blocks, check_range, copy_in, copy_layers_in, copy_out, empty_cache
from workers.pool.span import BlockSpan


@dataclass(frozen=True)
class Writer:
    """Writes tokens from `begin` on of the sequence in `blocks`."""

    data: Tensor
    blocks: Sequence[int]
    begin: int

    def write(self, first: int, states: Tensor) -> None:
        """Layers from `first` on, `(n, 2, T, H, D)`."""
        copy_layers_in(self.data, self.blocks, self.begin, first, states)

    def copy(self, span: BlockSpan, layers: Mapping[int, int]) -> None:
        """Whole layers of the same tokens in other blocks: for each layer here the one there that it gets."""
        span.copy_layers(self.data, self.blocks, self.begin, layers)


class PoolMemory:
    def __init__(self, arena: Arena):
        self.arena = arena
        self._closed = False

    @property
    def layout(self) -> KVLayout:
        return self.arena.layout

    @property
    def epoch(self) -> str:
        return self.arena.epoch

    def export(self) -> PoolExport:
        return self.arena.export()

    def gather(self, blocks: Sequence[int], begin: int, end: int, out: KVCache | None = None) -> KVCache:
        """Tokens `[begin, end)` of the sequence in `blocks`, as layers `(H, T, D)` (views of token-major memory).

        With `out`, which must start at `begin` and hold `end - begin` tokens, its tensors are filled; they may be views
        in any memory order and of another dtype.
        """
        self._check_open()
        check_blocks(blocks, self.arena.num_blocks, InvalidRequest)
        check_range(blocks, begin, end, self.layout.block_tokens)
        out = empty_cache(self.layout, begin, end, self.arena.data.device) if out is None else out
        if (out.start, out.num_tokens) != (begin, end - begin):
            raise InvalidRequest(f"out holds {out.num_tokens} tokens from {out.start}; asked for [{begin}, {end})")
        copy_out(self.arena.data, blocks, out)
        return out

    def scatter(self, blocks: Sequence[int], source: KVCache) -> None:
        """Write `source` into the sequence in `blocks`, at its own positions, which need not be block-aligned."""
        with self.writing(blocks, source.start, source.start + source.num_tokens):
            copy_in(self.arena.data, blocks, source)

    @contextmanager
    def writing(self, blocks: Sequence[int], begin: int, end: int) -> Iterator[Writer]:
        """Marks a write of tokens `[begin, end)`, which the `Writer` does."""
        self._check_open()
        check_blocks(blocks, self.arena.num_blocks, InvalidRequest)
        check_range(blocks, begin, end, self.layout.block_tokens)
        touched = blocks[begin // self.layout.block_tokens : blocks_for(end, self.layout.block_tokens)]
        with self.arena.writing(touched):
            yield Writer(self.arena.data, blocks, begin)

    def _check_open(self) -> None:
        if self._closed:
            raise WorkerUnavailable("the pool is closed")
