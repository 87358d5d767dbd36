"""Copies between a pool's blocks and per-layer tensors, on any device. Plain functions over tensors.

    tokens      begin ........................... end
    blocks      |  first, cut  | whole blocks | last, cut  |

Whole blocks move by slice where their ids are contiguous, and otherwise by index or one by one. The cut ends move by
slice. Work is per layer or block, never per token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from mappers.cache import Kind, KVCache, KVGeometry
from workers.api.errors import InvalidRequest, KvrelayError
from workers.api.schemas import KVLayout

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
KEY, VALUE = 0, 1


def torch_dtype(name: str) -> torch.dtype:
    if name not in _DTYPES:
        raise InvalidRequest(f"unknown KV dtype {name!r}; known: {', '.join(_DTYPES)}", param="dtype")
    return _DTYPES[name]


def block_bytes(layout: KVLayout) -> int:
    return layout.block_elements * torch_dtype(layout.dtype).itemsize


def blocks_for(num_tokens: int, block_tokens: int) -> int:
    return -(-num_tokens // block_tokens)


def block_shape(layout: KVLayout) -> tuple[int, int, int, int, int]:
    return cache_shape(layout, layout.block_tokens)


def cache_shape(layout: KVLayout, num_tokens: int) -> tuple[int, int, int, int, int]:
    return (layout.num_layers, 2, num_tokens, layout.num_kv_heads, layout.head_dim)


def cache_in(memory: Tensor, begin: int) -> KVCache:
    """View `memory` (L, 2, T, H, D) as a cache from `begin` on. It is token-major like blocks, so a layer of a block
    moves in one contiguous run."""
    stack = memory.transpose(2, 3)  # (L, 2, H, T, D)
    return KVCache(tuple(stack[:, KEY].unbind()), tuple(stack[:, VALUE].unbind()), begin)


def empty_cache(layout: KVLayout, begin: int, end: int, device: torch.device | str = "cpu") -> KVCache:
    """Allocate an uninitialised cache for tokens `[begin, end)` in the pool's dtype."""
    shape = cache_shape(layout, end - begin)
    return cache_in(torch.empty(shape, dtype=torch_dtype(layout.dtype), device=device), begin)


@dataclass(frozen=True)
class BlockRun:
    """Tokens `[low, high)` of every block in `blocks`: tokens `[at, at + len(blocks) * (high - low))` of the range that
    is copied."""

    blocks: tuple[int, ...]
    low: int
    high: int
    at: int

    @property
    def num_tokens(self) -> int:
        return len(self.blocks) * (self.high - self.low)

    @cached_property
    def row(self) -> slice | None:
        """The blocks as a slice if their ids are contiguous, else None."""
        first, count = self.blocks[0], len(self.blocks)
        return slice(first, first + count) if self.blocks == tuple(range(first, first + count)) else None


def block_runs(blocks: Sequence[int], begin: int, end: int, block_tokens: int) -> Iterator[BlockRun]:
    """Split the range `[begin, end)` of the sequence in `blocks` into whole blocks and cut ends."""
    check_range(blocks, begin, end, block_tokens)
    at = begin
    while at < end:
        first, low = divmod(at, block_tokens)
        whole = 0 if low else (end - at) // block_tokens
        high = block_tokens if whole else min(block_tokens, low + end - at)
        yield (run := BlockRun(tuple(blocks[first : first + max(whole, 1)]), low, high, at - begin))
        at += run.num_tokens


def copy_out(data: Tensor, blocks: Sequence[int], out: KVCache) -> None:
    """Fill `out` with tokens `[out.start, out.start + out.num_tokens)` of the sequence in `blocks` of `data`."""
    for run in block_runs(blocks, out.start, out.start + out.num_tokens, data.shape[3]):
        for layer, (keys, values) in enumerate(zip(out.keys, out.values, strict=True)):
            _read_run(data[:, layer, KEY], run, _window(keys, run))
            _read_run(data[:, layer, VALUE], run, _window(values, run))


def copy_in(data: Tensor, blocks: Sequence[int], source: KVCache) -> None:
    """Write `source` at its positions into the sequence in `blocks` of `data`. Casts to the pool's dtype."""
    for layer, (keys, values) in enumerate(zip(source.keys, source.values, strict=True)):
        copy_layer_in(data, blocks, source.start, layer, keys, values)


def copy_layer_in(data: Tensor, blocks: Sequence[int], begin: int, layer: int, keys: Tensor, values: Tensor) -> None:
    """Write one layer's keys and values, `(H, T, D)` each, as tokens `[begin, begin + T)`."""
    for run in block_runs(blocks, begin, begin + keys.shape[1], data.shape[3]):
        _write_run(data[:, layer, KEY], run, _window(keys, run))
        _write_run(data[:, layer, VALUE], run, _window(values, run))


def copy_layers_in(data: Tensor, blocks: Sequence[int], begin: int, first: int, states: Tensor) -> None:
    """Write the layers from `first` on, keys and values `(n, 2, T, H, D)`, as tokens `[begin, begin + T)`."""
    store = data[:, first : first + len(states)]  # (num_blocks, n, 2, block_tokens, H, D)
    for run in block_runs(blocks, begin, begin + states.shape[2], data.shape[3]):
        shape = (len(states), 2, len(run.blocks), run.high - run.low, *states.shape[3:])
        window = states[:, :, run.at : run.at + run.num_tokens].view(shape).movedim(2, 0)
        if run.row is not None:
            store[run.row, :, :, run.low : run.high].copy_(window)
        else:
            for block, part in zip(run.blocks, window, strict=True):
                store[block, :, :, run.low : run.high].copy_(part)


def check_blocks(blocks: Sequence[int], num_blocks: int, error: type[KvrelayError]) -> None:
    """Raise `error` for the first block id that is not in the pool."""
    for block in blocks:
        if not 0 <= block < num_blocks:
            raise error(f"block {block} does not exist; this pool has blocks 0..{num_blocks - 1}", param="blocks")


def check_range(blocks: Sequence[int], begin: int, end: int, block_tokens: int) -> None:
    if not 0 <= begin <= end <= len(blocks) * block_tokens:
        raise InvalidRequest(f"tokens [{begin}, {end}) are outside of {len(blocks)} blocks of {block_tokens}")


def _window(layer: Tensor, run: BlockRun) -> Tensor:
    """View the run's tokens in a layer `(H, T, D)` as `(blocks, tokens, H, D)`."""
    heads, _, dim = layer.shape
    window = layer[:, run.at : run.at + run.num_tokens]
    return window.view(heads, len(run.blocks), run.high - run.low, dim).permute(1, 2, 0, 3)


def _read_run(store: Tensor, run: BlockRun, window: Tensor) -> None:
    """Fill the run's window from one layer's blocks `(num_blocks, block_tokens, H, D)`."""
    alike = window.is_contiguous() and (window.dtype, window.device) == (store.dtype, store.device)
    if run.row is None and alike:
        torch.index_select(store, 0, _index(run, store), out=window)
    else:
        window.copy_(_run_of(store, run))


def _write_run(store: Tensor, run: BlockRun, window: Tensor) -> None:
    """Write the run's window to one layer's blocks."""
    if run.row is not None:
        store[run.row, run.low : run.high].copy_(window)
    else:
        store.index_copy_(0, _index(run, store), window.to(store))


def _run_of(store: Tensor, run: BlockRun) -> Tensor:
    """Return the run of one layer's blocks as `(blocks, tokens, H, D)`: a view if the blocks are contiguous."""
    if run.row is None:
        return store.index_select(0, _index(run, store))
    return store[run.row, run.low : run.high]


def _index(run: BlockRun, store: Tensor) -> Tensor:
    return torch.tensor(run.blocks, dtype=torch.int64, device=store.device)


@dataclass(frozen=True)
class BlockSpan:
    """Consecutive tokens in the blocks where they are stored; the source of a map.

    The first token is the `offset`-th of the first block, and has position `start`. Its parts are views where blocks
    are contiguous, and copies otherwise.
    """

    data: Tensor  # (num_blocks, L, 2, block_tokens, H, D)
    blocks: Sequence[int]
    offset: int
    num_tokens: int
    start: int

    @property
    def geometry(self) -> KVGeometry:
        _, layers, _, _, heads, dim = self.data.shape
        return KVGeometry(layers, heads, dim)

    @property
    def scratch_bytes(self) -> int:
        """Size of the largest part that is a copy."""
        scattered = (run.num_tokens for run in self._runs if run.row is None)
        return max(scattered, default=0) * self.geometry.width * self.data.itemsize

    def parts(self, kind: Kind, layer: int) -> Iterator[Tensor]:
        """Yield the tokens as tensors `(n, t, H, D)`."""
        store = self.data[:, layer, KEY if kind == "keys" else VALUE]
        return (_run_of(store, run) for run in self._runs)

    def copy_out(self, out: KVCache) -> None:
        """Fill a cache of as many tokens."""
        copy_out(self.data, self.blocks, KVCache(out.keys, out.values, self.offset))

    def copy_layers(self, data: Tensor, blocks: Sequence[int], begin: int, layers: Mapping[int, int]) -> None:
        """Write whole layers as tokens from `begin` on of the sequence in `blocks` of `data`, block by block.

        `layers` maps each layer there to its source layer here. Casts to the dtype of `data`.
        """
        at, runs = 0, _layer_runs(layers)
        while at < self.num_tokens:
            from_block, low = divmod(self.offset + at, self.data.shape[3])
            to_block, to_low = divmod(begin + at, data.shape[3])
            count = min(self.num_tokens - at, self.data.shape[3] - low, data.shape[3] - to_low)
            for to_layers, from_layers in runs:
                ours = self.data[self.blocks[from_block], from_layers, :, low : low + count]  # (layers, 2, count, H, D)
                data[blocks[to_block], to_layers, :, to_low : to_low + count].copy_(ours)
            at += count

    @cached_property
    def _runs(self) -> list[BlockRun]:
        return list(block_runs(self.blocks, self.offset, self.offset + self.num_tokens, self.data.shape[3]))


def _layer_runs(layers: Mapping[int, int]) -> list[tuple[slice, slice]]:
    """Group the pairs of layers into slices in which both sides are consecutive."""
    runs: list[tuple[slice, slice]] = []
    for to_layer, from_layer in sorted(layers.items()):
        last = runs[-1] if runs else None
        if last and (last[0].stop, last[1].stop) == (to_layer, from_layer):
            runs[-1] = slice(last[0].start, to_layer + 1), slice(last[1].start, from_layer + 1)
        else:
            runs.append((slice(to_layer, to_layer + 1), slice(from_layer, from_layer + 1)))
    return runs
