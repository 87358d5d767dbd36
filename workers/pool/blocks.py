"""Copies between a pool's blocks and per-layer tensors. Pure functions over tensors, on any device.

    tokens      begin ........................... end
    blocks      |  first, cut  | whole blocks | last, cut  |

Whole blocks move by slice where they stand in a row, and by index or one by one where they don't; the cut ends move by
slice. Work is per layer or block, never per token.

`BlockSpan`: tokens of a sequence in the blocks where they lie, for whoever reads them there."""

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
    return (layout.num_layers, 2, layout.block_tokens, layout.num_kv_heads, layout.head_dim)


def cache_shape(layout: KVLayout, num_tokens: int) -> tuple[int, int, int, int, int]:
    return (layout.num_layers, 2, num_tokens, layout.num_kv_heads, layout.head_dim)


def cache_in(memory: Tensor, begin: int) -> KVCache:
    """`memory` (L, 2, T, H, D) as a cache from `begin` on; token-major as blocks are, so that a block's layer moves in
    one run of memory."""
    stack = memory.transpose(2, 3)  # (L, 2, H, T, D)
    return KVCache(tuple(stack[:, KEY].unbind()), tuple(stack[:, VALUE].unbind()), begin)


def empty_cache(layout: KVLayout, begin: int, end: int, device: torch.device | str = "cpu") -> KVCache:
    """An uninitialised cache for tokens `[begin, end)` in the pool's dtype."""
    shape = cache_shape(layout, end - begin)
    return cache_in(torch.empty(shape, dtype=torch_dtype(layout.dtype), device=device), begin)


@dataclass(frozen=True)
class BlockRun:
    """Tokens `[low, high)` of every block in `blocks`; they are tokens `[at, at + len(blocks) * (high - low))` of the
    range that is copied."""

    blocks: tuple[int, ...]
    low: int
    high: int
    at: int

    @property
    def num_tokens(self) -> int:
        return len(self.blocks) * (self.high - self.low)

    @cached_property
    def row(self) -> slice | None:
        """The blocks as a slice, if they stand in a row."""
        first, count = self.blocks[0], len(self.blocks)
        return slice(first, first + count) if self.blocks == tuple(range(first, first + count)) else None


def block_runs(blocks: Sequence[int], begin: int, end: int, block_tokens: int) -> Iterator[BlockRun]:
    """The range `[begin, end)` of a sequence that lies in `blocks`, cut where whole blocks begin and end."""
    check_range(blocks, begin, end, block_tokens)
    at = begin
    while at < end:
        first, low = divmod(at, block_tokens)
        whole = 0 if low else (end - at) // block_tokens
        high = block_tokens if whole else min(block_tokens, low + end - at)
        yield (piece := BlockRun(tuple(blocks[first : first + max(whole, 1)]), low, high, at - begin))
        at += piece.num_tokens


def copy_out(data: Tensor, blocks: Sequence[int], out: KVCache) -> None:
    """Fill `out` with tokens `[out.start, out.start + out.num_tokens)` of the sequence in `blocks` of `data`."""
    for piece in block_runs(blocks, out.start, out.start + out.num_tokens, data.shape[3]):
        for layer, (keys, values) in enumerate(zip(out.keys, out.values, strict=True)):
            _take(data[:, layer, KEY], piece, _window(keys, piece))
            _take(data[:, layer, VALUE], piece, _window(values, piece))


def copy_in(data: Tensor, blocks: Sequence[int], source: KVCache) -> None:
    """Write `source` into the sequence in `blocks` of `data`, at the positions it has. Casts to the pool's dtype."""
    for layer, (keys, values) in enumerate(zip(source.keys, source.values, strict=True)):
        copy_layer_in(data, blocks, source.start, layer, keys, values)


def copy_layer_in(
    data: Tensor, blocks: Sequence[int], begin: int, layer: int, keys: Tensor, values: Tensor
) -> None:
    """Write one layer's keys and values, `(H, T, D)` each, as tokens `[begin, begin + T)`."""
    for piece in block_runs(blocks, begin, begin + keys.shape[1], data.shape[3]):
        _give(data[:, layer, KEY], piece, _window(keys, piece))
        _give(data[:, layer, VALUE], piece, _window(values, piece))


def copy_layers_in(data: Tensor, blocks: Sequence[int], begin: int, first: int, states: Tensor) -> None:
    """Write the layers from `first` on, keys and values `(n, 2, T, H, D)`, as tokens `[begin, begin + T)`."""
    store = data[:, first : first + len(states)]  # (num_blocks, n, 2, block_tokens, H, D)
    for piece in block_runs(blocks, begin, begin + states.shape[2], data.shape[3]):
        shape = (len(states), 2, len(piece.blocks), piece.high - piece.low, *states.shape[3:])
        window = states[:, :, piece.at : piece.at + piece.num_tokens].view(shape).movedim(2, 0)
        if piece.row is not None:
            store[piece.row, :, :, piece.low : piece.high].copy_(window)
        else:
            for block, part in zip(piece.blocks, window, strict=True):
                store[block, :, :, piece.low : piece.high].copy_(part)


def check_blocks(blocks: Sequence[int], num_blocks: int, error: type[KvrelayError]) -> None:
    """Raise `error` for the first block id that the pool does not have."""
    for block in blocks:
        if not 0 <= block < num_blocks:
            raise error(f"block {block} does not exist; this pool has blocks 0..{num_blocks - 1}", param="blocks")


def check_range(blocks: Sequence[int], begin: int, end: int, block_tokens: int) -> None:
    if not 0 <= begin <= end <= len(blocks) * block_tokens:
        raise InvalidRequest(f"tokens [{begin}, {end}) do not lie in {len(blocks)} blocks of {block_tokens}")


def _window(layer: Tensor, piece: BlockRun) -> Tensor:
    """The piece's place in a layer `(H, T, D)`, as a view `(blocks, tokens, H, D)`."""
    heads, _, dim = layer.shape
    window = layer[:, piece.at : piece.at + piece.num_tokens]
    return window.view(heads, len(piece.blocks), piece.high - piece.low, dim).permute(1, 2, 0, 3)


def _take(store: Tensor, piece: BlockRun, window: Tensor) -> None:
    """Fill the piece's window from one layer's blocks `(num_blocks, block_tokens, H, D)`."""
    alike = window.is_contiguous() and (window.dtype, window.device) == (store.dtype, store.device)
    if piece.row is None and alike:
        torch.index_select(store, 0, _index(piece, store), out=window)
    else:
        window.copy_(taken(store, piece))


def _give(store: Tensor, piece: BlockRun, window: Tensor) -> None:
    """Write the piece's window to one layer's blocks."""
    if piece.row is not None:
        store[piece.row, piece.low : piece.high].copy_(window)
    else:
        store.index_copy_(0, _index(piece, store), window.to(store))


def taken(store: Tensor, piece: BlockRun) -> Tensor:
    """The piece of one layer's blocks `(num_blocks, block_tokens, H, D)`, as `(blocks, tokens, H, D)`: a view if they
    stand in a row."""
    if piece.row is None:
        return store.index_select(0, _index(piece, store))
    return store[piece.row, piece.low : piece.high]


def _index(piece: BlockRun, store: Tensor) -> Tensor:
    return torch.tensor(piece.blocks, dtype=torch.int64, device=store.device)


@dataclass(frozen=True)
class BlockSpan:
    """Tokens in a row: the first is the `offset`-th of the first block, and stands at position `start`. A map's source:
    its parts are views where blocks stand in a row, and copies where they don't."""

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
        """Of the largest part that is a copy."""
        scattered = (piece.num_tokens for piece in self._pieces if piece.row is None)
        return max(scattered, default=0) * self.geometry.width * self.data.itemsize

    def parts(self, kind: Kind, layer: int) -> Iterator[Tensor]:
        """(n, t, H, D) each."""
        store = self.data[:, layer, KEY if kind == "keys" else VALUE]
        return (taken(store, piece) for piece in self._pieces)

    def copy_out(self, out: KVCache) -> None:
        """Fill a cache of as many tokens."""
        copy_out(self.data, self.blocks, KVCache(out.keys, out.values, self.offset))

    def copy_layers(self, data: Tensor, blocks: Sequence[int], begin: int, layers: Mapping[int, int]) -> None:
        """Write whole layers as tokens from `begin` on of the sequence in `blocks` of `data`: for each layer there the
        one here that it gets. In one pass, from block to block; casts to the dtype of `data`."""
        at, runs = 0, _runs(layers)
        while at < self.num_tokens:
            from_block, low = divmod(self.offset + at, self.data.shape[3])
            to_block, to_low = divmod(begin + at, data.shape[3])
            count = min(self.num_tokens - at, self.data.shape[3] - low, data.shape[3] - to_low)
            for to_layers, from_layers in runs:
                ours = self.data[self.blocks[from_block], from_layers, :, low : low + count]  # (layers, 2, count, H, D)
                data[blocks[to_block], to_layers, :, to_low : to_low + count].copy_(ours)
            at += count

    @cached_property
    def _pieces(self) -> list[BlockRun]:
        return list(block_runs(self.blocks, self.offset, self.offset + self.num_tokens, self.data.shape[3]))


def _runs(layers: Mapping[int, int]) -> list[tuple[slice, slice]]:
    """The layers and what each gets, as slices of both as long as both count on."""
    runs: list[tuple[slice, slice]] = []
    for to_layer, from_layer in sorted(layers.items()):
        last = runs[-1] if runs else None
        if last and (last[0].stop, last[1].stop) == (to_layer, from_layer):
            runs[-1] = slice(last[0].start, to_layer + 1), slice(last[1].start, from_layer + 1)
        else:
            runs.append((slice(to_layer, to_layer + 1), slice(from_layer, from_layer + 1)))
    return runs
