"""How one chunk of tokens is mapped: the arithmetic of a bundle, laid out for speed.

    source chunk ──strip──►  keys   │  features: a block for each key layer, then for each value layer, that is needed
                 ──copy───►  values │  side by side (T, C), or for weights matched by heads head after head (n, T, D)
    target layer t:  out (T, W) = bias + Σ over runs of neighbouring blocks: features[:, run] @ weight
                     keys: RoPE applied;  as many neighbouring layers as find room are handed out together

Neighbouring source layers are one matmul on a slice, so features are never gathered. A factored weight is two thin
matmuls. One matched by heads is small ones, from a source head to the neighbouring target heads that share it; they run
at full speed on heads that lie together in memory. Weights that are kept as halves multiply features rounded to halves;
all sums are float32. Scratch is bounded by the chunk.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Literal

import torch
from torch import Tensor

from mappers.cache import KVChunk
from mappers.errors import BundleCorrupt
from mappers.manifest import COPY, KINDS, Block, Kind, Manifest, OutputSpec, weight_name
from mappers.rope import Factors, Rope, inverse, rotate

Form = Literal["whole", "by_head"]  # of the features
HALVES = (torch.float16, torch.bfloat16)
MADE_BYTES = 8 * 2**20  # for layers that are handed out together: one at least, and no more than a cache holds


class Workspace:
    """Scratch of one thread, reused from chunk to chunk and grown when a longer one comes."""

    def __init__(self, manifest: Manifest, device: torch.device):
        self._blocks, self._rank = blocks_of(manifest), rank_of(manifest)
        self._source, self._target = manifest.source.geometry, manifest.target.geometry
        self._device = device
        self._num_tokens = 0
        self._buffers: dict[str, Tensor] = {}
        self._made = torch.empty(0)

    def begin(self, chunk: KVChunk, source_rope: Rope, target_rope: Rope) -> Chunk:
        """Strip and lay out one chunk of the source's cache."""
        if chunk.num_tokens > self._num_tokens:
            self._allocate(chunk.num_tokens)
        work = Chunk(chunk, {name: buffer[: chunk.num_tokens] for name, buffer in self._buffers.items()}, self._made)
        span = (chunk.start, chunk.num_tokens, self._device)
        strip = [inverse(*factors) for factors in source_rope.span(*span)]
        work.set_ropes(_by_layer(strip, source_rope), _by_layer(target_rope.span(*span), target_rope))
        for form, blocks in self._blocks.items():
            work.lay_out(form, blocks)
        return work

    @property
    def num_bytes(self) -> int:
        return self._made.nbytes + sum(buffer.nbytes for buffer in self._buffers.values())

    def _allocate(self, num_tokens: int) -> None:
        def empty(*shape: int) -> Tensor:
            return torch.empty(shape, device=self._device)

        source, target = self._source, self._target
        heads = {form: len(blocks) * source.num_kv_heads for form, blocks in self._blocks.items()}
        layer = 2 * num_tokens * target.width
        self._made = empty(max(layer, min(layer * target.num_layers, MADE_BYTES // 4)))
        self._buffers = {
            "whole": empty(num_tokens, heads["whole"], source.head_dim),
            "by_head": empty(heads["by_head"], num_tokens, source.head_dim).transpose(0, 1),
            "inner": empty(num_tokens, self._rank),
            "keys": empty(num_tokens, target.num_kv_heads, target.head_dim),
        }
        self._num_tokens = num_tokens


class Chunk:
    """One chunk being mapped: its source, the features made of it, and where outputs go.

    `buffers` have the tokens first, however they lie in memory; `made` is for outputs.
    """

    def __init__(self, source: KVChunk, buffers: dict[str, Tensor], made: Tensor):
        self.source = source
        self._buffers = buffers
        shape = buffers["keys"].shape  # (T, H, D)
        count = len(made) // max(1, 2 * shape.numel())
        self.rooms = made[: count * 2 * shape.numel()].view(count, 2, *shape)  # for so many layers of outputs
        self._columns: dict[torch.dtype, Tensor] = {}
        self._heads: dict[torch.dtype, tuple[Tensor, ...]] = {}

    def set_ropes(self, strip: Sequence[Factors], apply: Sequence[Factors]) -> None:
        """What takes RoPE off the keys of each source layer, and what puts it on those of each target layer."""
        self._strip, self._apply = strip, apply  # (T, 1, R)

    def lay_out(self, form: Form, blocks: Sequence[Block]) -> None:
        """Fill the features of this form from these blocks."""
        heads = self.source.geometry.num_kv_heads
        for index, (kind, layer) in enumerate(blocks):
            self._take(kind, layer, self._buffers[form][:, index * heads : (index + 1) * heads])  # (T, H, D)

    def _take(self, kind: Kind, layer: int, out: Tensor) -> None:
        """Fill `out` (T, H, D) with a source layer's keys, stripped, or its values."""
        for part, room, cos, sin in _with_places(self.source.parts(kind, layer), out, *self._strip[layer]):
            if kind == "keys":
                rotate(part.to(room.device, torch.float32), cos, sin, room)
            else:
                room.copy_(part)

    def columns(self, dtype: torch.dtype) -> Tensor:
        """(T, C): stripped keys and values of the needed source layers side by side, in one precision."""
        if dtype not in self._columns:
            self._columns[dtype] = self._buffers["whole"].flatten(1).to(dtype)
        return self._columns[dtype]

    def heads(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """(T, D) each: the same by head, each together in memory."""
        if dtype not in self._heads:
            self._heads[dtype] = self._buffers["by_head"].to(dtype).unbind(1)
        return self._heads[dtype]

    def out(self, kind: Kind, room: Tensor) -> Tensor:
        """(T, W): where the product for a target layer's room (T, H, D) goes; keys are turned on their way there."""
        return (self._buffers["keys"] if kind == "keys" else room).flatten(1)

    def inner(self, rank: int) -> Tensor:
        """(T, rank): what stands between two factors."""
        return self._buffers["inner"][:, :rank]

    def finish(self, kind: Kind, layer: int, room: Tensor) -> None:
        """Bring what `out` holds into the room, keys with RoPE."""
        if kind == "keys":
            rotate(self._buffers["keys"], *self._apply[layer], room)


class Output(ABC):
    """Makes one target layer's keys or values of a chunk."""

    @abstractmethod
    def make(self, chunk: Chunk, room: Tensor) -> None:
        """Fill `room` (T, H, D)."""


@dataclass(frozen=True)
class CopyOutput(Output):
    kind: Kind
    source_layer: int

    def make(self, chunk: Chunk, room: Tensor) -> None:
        for part, place in _with_places(chunk.source.parts(self.kind, self.source_layer), room):
            place.copy_(part)


@dataclass(frozen=True)
class Term(ABC):
    """Some of the features (T, p), times `weight` (p, w), for columns `[at, at + w)` of a matrix; plus `bias` (w,), or
    without one to what stands there already."""

    weight: Tensor
    bias: Tensor | None
    at: int = 0

    @abstractmethod
    def features(self, chunk: Chunk) -> Tensor:
        """(T, p), of the weight's dtype."""

    def add_to(self, out: Tensor, chunk: Chunk) -> None:
        part = out[:, self.at : self.at + self.weight.shape[1]]
        add_product(part if self.bias is None else self.bias, self.features(chunk), self.weight, part)


@dataclass(frozen=True, kw_only=True)
class BlockTerm(Term):
    """Neighbouring blocks, the columns from `begin` on."""

    begin: int

    def features(self, chunk: Chunk) -> Tensor:
        return chunk.columns(self.weight.dtype)[:, self.begin : self.begin + len(self.weight)]


@dataclass(frozen=True, kw_only=True)
class HeadTerm(Term):
    """One source head, by its place among all that are needed."""

    index: int

    def features(self, chunk: Chunk) -> Tensor:
        return chunk.heads(self.weight.dtype)[self.index]


@dataclass(frozen=True)
class LinearOutput(Output):
    kind: Kind
    layer: int  # of the target
    terms: tuple[Term, ...]

    def make(self, chunk: Chunk, room: Tensor) -> None:
        out = chunk.out(self.kind, room)
        for term in self.terms:
            term.add_to(out, chunk)
        chunk.finish(self.kind, self.layer, room)


@dataclass(frozen=True)
class FactoredOutput(Output):
    """`terms` lead to (T, r), and `up` (r, W) from there."""

    kind: Kind
    layer: int  # of the target
    terms: tuple[Term, ...]
    up: Tensor
    bias: Tensor  # (W,)

    def make(self, chunk: Chunk, room: Tensor) -> None:
        inner = chunk.inner(len(self.up))
        for term in self.terms:
            term.add_to(inner, chunk)
        add_product(self.bias, inner.to(self.up.dtype), self.up, chunk.out(self.kind, room))
        chunk.finish(self.kind, self.layer, room)


def blocks_of(manifest: Manifest) -> dict[Form, list[Block]]:
    """What stands in the features of each form, since some target layer is computed from it: keys and then values."""
    needed: dict[Form, set[Block]] = {"whole": set(), "by_head": set()}
    for layer in manifest.layers:
        for spec in (layer.keys, layer.values):
            if spec.method != COPY:
                needed["by_head" if spec.heads else "whole"].update(spec.blocks)
    return {form: sorted(blocks) for form, blocks in needed.items()}


def rank_of(manifest: Manifest) -> int:
    """The largest rank of a factored output."""
    return max(spec.of(kind).rank or 0 for spec in manifest.layers for kind in KINDS)


def add_product(addend: Tensor, left: Tensor, right: Tensor, out: Tensor) -> None:
    """addend + left (n, p) @ right (p, q) into `out`. Factors are both float32 or both the same half; sums
    are float32."""
    if right.dtype == torch.float32:
        torch.addmm(addend, left, right, out=out)
    elif right.is_cuda:
        torch.add(addend, torch.mm(left, right, out_dtype=torch.float32), out=out)
    else:
        torch.add(addend, left.float() @ right.float(), out=out)


def outputs_of(manifest: Manifest, weights: Mapping[str, Tensor], halves: bool) -> list[tuple[Output, Output]]:
    """Keys' and values' output of every target layer; weights stored as halves are multiplied as such if `halves`.

    Raises `BundleCorrupt` where weights and manifest disagree.
    """
    maker = _OutputMaker(manifest, weights, halves)
    return [(maker.make(i, "keys"), maker.make(i, "values")) for i in range(len(manifest.layers))]


class _OutputMaker:
    def __init__(self, manifest: Manifest, weights: Mapping[str, Tensor], halves: bool):
        self._manifest, self._weights, self._halves = manifest, weights, halves
        self._source, self._target = manifest.source.geometry, manifest.target.geometry
        self._blocks = blocks_of(manifest)

    def make(self, layer: int, kind: Kind) -> Output:
        spec = self._manifest.layers[layer].of(kind)
        if spec.method == COPY:
            return CopyOutput(kind, *(spec.key_layers if kind == "keys" else spec.value_layers))
        bias = self._tensor(weight_name(layer, kind, "bias"), (self._target.width,))
        name = weight_name(layer, kind, "weight")
        if spec.heads:
            return LinearOutput(kind, layer, tuple(self._heads(name, spec, bias)))
        width_in = self._source.width
        at = [self._blocks["whole"].index(block) for block in spec.blocks]
        if spec.rank is None:
            weight = self._tensor(name, (len(spec.blocks) * width_in, self._target.width))
            return LinearOutput(kind, layer, tuple(_runs(at, weight, width_in, bias)))
        down = self._tensor(name, (len(spec.blocks) * width_in, spec.rank))
        up = self._tensor(weight_name(layer, kind, "up"), (spec.rank, self._target.width))
        return FactoredOutput(kind, layer, tuple(_runs(at, down, width_in, bias.new_zeros(spec.rank))), up, bias)

    def _heads(self, name: str, spec: OutputSpec, bias: Tensor) -> Iterator[HeadTerm]:
        """For every block, the source heads that target heads are matched with; neighbours that share one together."""
        self._check_heads(name, spec)
        source, target = self._source, self._target
        weight = self._tensor(name, (len(spec.heads), len(spec.blocks) * source.head_dim, target.head_dim))
        parts = weight.tensor_split(len(spec.blocks), dim=1)  # (target heads, D of the source, D) each
        for part, block, matched in zip(parts, spec.blocks, zip(*spec.heads, strict=True), strict=True):
            first = self._blocks["by_head"].index(block) * source.num_kv_heads
            for head, group in groupby(enumerate(matched), key=itemgetter(1)):
                together = [index for index, _ in group]
                columns = slice(together[0] * target.head_dim, (together[-1] + 1) * target.head_dim)
                side_by_side = torch.cat(part[together].unbind(), dim=1)
                yield HeadTerm(
                    side_by_side, bias[columns] if part is parts[0] else None, columns.start, index=first + head
                )

    def _check_heads(self, name: str, spec: OutputSpec) -> None:
        needed, given, there = len(spec.blocks), self._source.num_kv_heads, self._target.num_kv_heads
        if len(spec.heads) != there or any(len(chosen) != needed for chosen in spec.heads):
            raise BundleCorrupt(f"{name}: heads {spec.heads}; need {needed} for each of {there}")
        if any(not 0 <= head < given for chosen in spec.heads for head in chosen):
            raise BundleCorrupt(f"{name}: heads {spec.heads}; the source has {given}")

    def _tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        found = self._weights.get(name)
        if found is None or tuple(found.shape) != shape:
            held = None if found is None else tuple(found.shape)
            raise BundleCorrupt(f"tensor {name!r}: the manifest asks for {shape}, the weights hold {held}")
        kept = self._halves and found.dtype in HALVES
        return (found if kept else found.float()).contiguous()


def _with_places(parts: Iterable[Tensor], *wholes: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Each part (n, t, H, D) of all tokens, and its place in every whole (T, ...), as views (n, t, ...)."""
    at = 0
    for part in parts:
        rows, tokens = part.shape[:2]
        span = slice(at, at + rows * tokens)
        yield part, *(whole[span].view(rows, tokens, *whole.shape[1:]) for whole in wholes)
        at = span.stop


def _by_layer(tables: Sequence[Factors], rope: Rope) -> list[Factors]:
    """For each layer its table, shaped to turn all heads alike: (T, 1, R); layers share what is the same."""
    shaped = [(cos.unsqueeze(1), sin.unsqueeze(1)) for cos, sin in tables]
    return [shaped[table] for table in rope.tables]


def _runs(blocks: list[int], weight: Tensor, width: int, bias: Tensor) -> list[BlockTerm]:
    """Column blocks with their rows of `weight`, neighbours joined; the first brings the bias."""
    begins = [row for row, block in enumerate(blocks) if row == 0 or block != blocks[row - 1] + 1]
    ends = [*begins[1:], len(blocks)]
    return [
        BlockTerm(weight[begin * width : end * width], None if begin else bias, begin=blocks[begin] * width)
        for begin, end in zip(begins, ends, strict=True)
    ]
