"""`BlockSpan`: tokens of a sequence in the blocks where they lie, for whoever reads them there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from mappers.cache import Kind, KVCache, KVGeometry
from workers.pool.blocks import KEY, VALUE, Piece, copy_out, pieces, taken


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
    def _pieces(self) -> list[Piece]:
        return list(pieces(self.blocks, self.offset, self.offset + self.num_tokens, self.data.shape[3]))


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
