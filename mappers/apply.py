"""Applies a bundle's weights to one chunk of tokens.

    source chunk ──strip──►  keys   │  features: one block per needed key layer, then one per needed value layer,
                 ──copy───►  values │  side by side (T, C), or for head-matched weights head after head (n, T, D)
    target layer t:  out (T, W) = bias + Σ over runs of adjacent blocks: features[:, run] @ weight
                     keys: apply RoPE;  then pass on as many adjacent layers as fit in scratch memory

Adjacent source layers are one matmul on a slice, so features are never gathered. A factored weight is two thin matmuls.
A head-matched weight is small ones, from a source head to the adjacent target heads that share it; they run at full
speed on heads that are contiguous in memory. Weights kept in half precision multiply features rounded to it; all sums
are float32. Scratch memory is bounded by the chunk.
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

Form = Literal["whole", "by_head"]  # layout of the features
HALVES = (torch.float16, torch.bfloat16)
SLOTS_BYTES = 8 * 2**20  # of layers passed on together: at least one layer, and no more than a cache holds


class Workspace:
    """Scratch memory of one thread, reused for every chunk and grown for longer ones."""

    def __init__(self, manifest: Manifest, device: torch.device):
        self._blocks = blocks_of(manifest)
        self._rank = max(spec.of(kind).rank or 0 for spec in manifest.layers for kind in KINDS)
        self._source, self._target = manifest.source.geometry, manifest.target.geometry
        self._device = device
        self._num_tokens = 0
        self._buffers: dict[str, Tensor] = {}
        self._slots = torch.empty(0)

    def begin(self, chunk: KVChunk, source_rope: Rope, target_rope: Rope) -> ChunkWork:
        """Strip RoPE from one chunk and lay out its features."""
        if chunk.num_tokens > self._num_tokens:
            self._allocate(chunk.num_tokens)
        buffers = {name: buffer[: chunk.num_tokens] for name, buffer in self._buffers.items()}
        work = ChunkWork(chunk, buffers, self._slots)
        span = (chunk.start, chunk.num_tokens, self._device)
        strip = [inverse(*factors) for factors in source_rope.span(*span)]
        work.set_ropes(_by_layer(strip, source_rope), _by_layer(target_rope.span(*span), target_rope))
        for form, blocks in self._blocks.items():
            work.lay_out(form, blocks)
        return work

    @property
    def num_bytes(self) -> int:
        return self._slots.nbytes + sum(buffer.nbytes for buffer in self._buffers.values())

    def _allocate(self, num_tokens: int) -> None:
        def empty(*shape: int) -> Tensor:
            return torch.empty(shape, device=self._device)

        source, target = self._source, self._target
        heads = {form: len(blocks) * source.num_kv_heads for form, blocks in self._blocks.items()}
        layer = 2 * num_tokens * target.width
        self._slots = empty(max(layer, min(layer * target.num_layers, SLOTS_BYTES // 4)))
        self._buffers = {
            "whole": empty(num_tokens, heads["whole"], source.head_dim),
            "by_head": empty(heads["by_head"], num_tokens, source.head_dim).transpose(0, 1),
            "inner": empty(num_tokens, self._rank),
            "keys": empty(num_tokens, target.num_kv_heads, target.head_dim),
        }
        self._num_tokens = num_tokens


class ChunkWork:
    """One chunk being mapped: its source, its features, and the memory of its outputs.

    `buffers` are token-first, whatever their memory layout. `slots` (n, 2, T, H, D) hold the keys and values of n
    target layers.
    """

    def __init__(self, source: KVChunk, buffers: dict[str, Tensor], memory: Tensor):
        self.source = source
        self._buffers = buffers
        shape = buffers["keys"].shape  # (T, H, D)
        count = len(memory) // max(1, 2 * shape.numel())
        self.slots = memory[: count * 2 * shape.numel()].view(count, 2, *shape)
        self._columns: dict[torch.dtype, Tensor] = {}
        self._heads: dict[torch.dtype, tuple[Tensor, ...]] = {}

    def set_ropes(self, strip: Sequence[Factors], apply: Sequence[Factors]) -> None:
        """Set the factors (T, 1, R) that strip RoPE from each source layer and apply it to each target layer."""
        self._strip, self._apply = strip, apply

    def lay_out(self, form: Form, blocks: Sequence[Block]) -> None:
        """Fill the features of this form with these blocks: stripped keys, or values."""
        heads = self.source.geometry.num_kv_heads
        for index, (kind, layer) in enumerate(blocks):
            out = self._buffers[form][:, index * heads : (index + 1) * heads]  # (T, H, D)
            for part, room, cos, sin in _with_slices(self.source.parts(kind, layer), out, *self._strip[layer]):
                if kind == "keys":
                    rotate(part.to(room.device, torch.float32), cos, sin, room)
                else:
                    room.copy_(part)

    def columns(self, dtype: torch.dtype) -> Tensor:
        """Return features (T, C) of all needed blocks side by side, in one precision."""
        if dtype not in self._columns:
            self._columns[dtype] = self._buffers["whole"].flatten(1).to(dtype)
        return self._columns[dtype]

    def heads(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Return features (T, D) by head, each contiguous in memory."""
        if dtype not in self._heads:
            self._heads[dtype] = self._buffers["by_head"].to(dtype).unbind(1)
        return self._heads[dtype]

    def product(self, kind: Kind, slot: Tensor) -> Tensor:
        """Return the memory (T, W) for a product. Keys go through a buffer, since they are rotated into the slot."""
        return (self._buffers["keys"] if kind == "keys" else slot).flatten(1)

    def inner(self, rank: int) -> Tensor:
        """Return the memory (T, rank) between two factors."""
        return self._buffers["inner"][:, :rank]

    def finish(self, kind: Kind, layer: int, slot: Tensor) -> None:
        """Complete the slot (T, H, D) from `product`: apply RoPE to keys."""
        if kind == "keys":
            rotate(self._buffers["keys"], *self._apply[layer], slot)


class Output(ABC):
    """Computes one target layer's keys or values."""

    @abstractmethod
    def compute(self, work: ChunkWork, slot: Tensor) -> None:
        """Fill `slot` (T, H, D)."""


@dataclass(frozen=True)
class CopyOutput(Output):
    kind: Kind
    source_layer: int

    def compute(self, work: ChunkWork, slot: Tensor) -> None:
        for part, place in _with_slices(work.source.parts(self.kind, self.source_layer), slot):
            place.copy_(part)


@dataclass(frozen=True)
class Term(ABC):
    """One matmul: some features (T, p) times `weight` (p, w), for output columns `[at, at + w)`.

    Starts from `bias` (w,), or adds to the output if there is none.
    """

    weight: Tensor
    bias: Tensor | None
    at: int = 0

    @abstractmethod
    def features(self, work: ChunkWork) -> Tensor:
        """Return (T, p) in the weight's dtype."""

    def add_to(self, out: Tensor, work: ChunkWork) -> None:
        part = out[:, self.at : self.at + self.weight.shape[1]]
        add_product(part if self.bias is None else self.bias, self.features(work), self.weight, part)


@dataclass(frozen=True, kw_only=True)
class BlockTerm(Term):
    """Features of adjacent blocks, the columns from `begin` on."""

    begin: int

    def features(self, work: ChunkWork) -> Tensor:
        return work.columns(self.weight.dtype)[:, self.begin : self.begin + len(self.weight)]


@dataclass(frozen=True, kw_only=True)
class HeadTerm(Term):
    """Features of one source head, by its index among all needed ones."""

    index: int

    def features(self, work: ChunkWork) -> Tensor:
        return work.heads(self.weight.dtype)[self.index]


@dataclass(frozen=True)
class LinearOutput(Output):
    kind: Kind
    layer: int  # of the target
    terms: tuple[Term, ...]

    def compute(self, work: ChunkWork, slot: Tensor) -> None:
        out = work.product(self.kind, slot)
        for term in self.terms:
            term.add_to(out, work)
        work.finish(self.kind, self.layer, slot)


@dataclass(frozen=True)
class FactoredOutput(Output):
    """`terms` compute (T, r); `up` (r, W) and `bias` (W,) map it to the output."""

    kind: Kind
    layer: int  # of the target
    terms: tuple[Term, ...]
    up: Tensor
    bias: Tensor

    def compute(self, work: ChunkWork, slot: Tensor) -> None:
        inner = work.inner(len(self.up))
        for term in self.terms:
            term.add_to(inner, work)
        add_product(self.bias, inner.to(self.up.dtype), self.up, work.product(self.kind, slot))
        work.finish(self.kind, self.layer, slot)


def blocks_of(manifest: Manifest) -> dict[Form, list[Block]]:
    """Return the blocks that some target layer needs in each form, keys before values."""
    needed: dict[Form, set[Block]] = {"whole": set(), "by_head": set()}
    for layer in manifest.layers:
        for spec in (layer.keys, layer.values):
            if spec.method != COPY:
                needed["by_head" if spec.heads else "whole"].update(spec.blocks)
    return {form: sorted(blocks) for form, blocks in needed.items()}


def add_product(addend: Tensor, left: Tensor, right: Tensor, out: Tensor) -> None:
    """Write addend + left (n, p) @ right (p, q) to `out`.

    Factors are both float32 or both of one half precision; sums are float32.
    """
    if right.dtype == torch.float32:
        torch.addmm(addend, left, right, out=out)
    elif right.is_cuda:
        torch.add(addend, torch.mm(left, right, out_dtype=torch.float32), out=out)
    else:
        torch.add(addend, left.float() @ right.float(), out=out)


def outputs_of(manifest: Manifest, weights: Mapping[str, Tensor], halves: bool) -> list[tuple[Output, Output]]:
    """Build the keys' and values' output of every target layer; `halves` keeps weights stored in half precision.

    Raises `BundleCorrupt` if weights and manifest contradict each other.
    """
    builder = _OutputBuilder(manifest, weights, halves)
    return [(builder.build(i, "keys"), builder.build(i, "values")) for i in range(len(manifest.layers))]


class _OutputBuilder:
    def __init__(self, manifest: Manifest, weights: Mapping[str, Tensor], halves: bool):
        self._manifest, self._weights, self._halves = manifest, weights, halves
        self._source, self._target = manifest.source.geometry, manifest.target.geometry
        self._blocks = blocks_of(manifest)

    def build(self, layer: int, kind: Kind) -> Output:
        spec = self._manifest.layers[layer].of(kind)
        if spec.method == COPY:
            return CopyOutput(kind, *(spec.key_layers if kind == "keys" else spec.value_layers))
        bias = self._tensor(weight_name(layer, kind, "bias"), (self._target.width,))
        name = weight_name(layer, kind, "weight")
        if spec.heads:
            return LinearOutput(kind, layer, tuple(self._head_terms(name, spec, bias)))
        width_in = self._source.width
        at = [self._blocks["whole"].index(block) for block in spec.blocks]
        if spec.rank is None:
            weight = self._tensor(name, (len(spec.blocks) * width_in, self._target.width))
            return LinearOutput(kind, layer, tuple(_block_terms(at, weight, width_in, bias)))
        down = self._tensor(name, (len(spec.blocks) * width_in, spec.rank))
        up = self._tensor(weight_name(layer, kind, "up"), (spec.rank, self._target.width))
        terms = _block_terms(at, down, width_in, bias.new_zeros(spec.rank))
        return FactoredOutput(kind, layer, tuple(terms), up, bias)

    def _head_terms(self, name: str, spec: OutputSpec, bias: Tensor) -> Iterator[HeadTerm]:
        """Yield one term per block and matched source head, for all adjacent target heads that share it."""
        source, target = self._source, self._target
        # 1. Every target head names an existing source head of every block.
        if len(spec.heads) != target.num_kv_heads or any(len(chosen) != len(spec.blocks) for chosen in spec.heads):
            raise BundleCorrupt(
                f"{name}: heads {spec.heads}; need {len(spec.blocks)} for each of {target.num_kv_heads}"
            )
        if any(not 0 <= head < source.num_kv_heads for chosen in spec.heads for head in chosen):
            raise BundleCorrupt(f"{name}: heads {spec.heads}; the source has {source.num_kv_heads}")
        # 2. The terms; those of the first block start from the bias.
        weight = self._tensor(name, (len(spec.heads), len(spec.blocks) * source.head_dim, target.head_dim))
        parts = weight.tensor_split(len(spec.blocks), dim=1)  # (target heads, D of the source, D) each
        for part, block, matched in zip(parts, spec.blocks, zip(*spec.heads, strict=True), strict=True):
            first = self._blocks["by_head"].index(block) * source.num_kv_heads
            for head, group in groupby(enumerate(matched), key=itemgetter(1)):
                together = [index for index, _ in group]
                columns = slice(together[0] * target.head_dim, (together[-1] + 1) * target.head_dim)
                side_by_side = torch.cat(part[together].unbind(), dim=1)
                start = bias[columns] if part is parts[0] else None
                yield HeadTerm(side_by_side, start, columns.start, index=first + head)

    def _tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        found = self._weights.get(name)
        if found is None or tuple(found.shape) != shape:
            stored = None if found is None else tuple(found.shape)
            raise BundleCorrupt(f"tensor {name!r}: the manifest requires {shape}, the weights contain {stored}")
        is_kept = self._halves and found.dtype in HALVES
        return (found if is_kept else found.float()).contiguous()


def _with_slices(parts: Iterable[Tensor], *wholes: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield each part (n, t, H, D) of all tokens, with its slice of every whole (T, ...) as a view (n, t, ...)."""
    at = 0
    for part in parts:
        rows, tokens = part.shape[:2]
        span = slice(at, at + rows * tokens)
        yield part, *(whole[span].view(rows, tokens, *whole.shape[1:]) for whole in wholes)
        at = span.stop


def _by_layer(tables: Sequence[Factors], rope: Rope) -> list[Factors]:
    """Return each layer's factors shaped (T, 1, R) to rotate all heads. Layers share equal ones."""
    shaped = [(cos.unsqueeze(1), sin.unsqueeze(1)) for cos, sin in tables]
    return [shaped[table] for table in rope.tables]


def _block_terms(blocks: list[int], weight: Tensor, width: int, bias: Tensor) -> list[BlockTerm]:
    """Return one term per run of adjacent blocks; the first starts from the bias."""
    begins = [row for row, block in enumerate(blocks) if row == 0 or block != blocks[row - 1] + 1]
    ends = [*begins[1:], len(blocks)]
    return [
        BlockTerm(weight[begin * width : end * width], None if begin else bias, begin=blocks[begin] * width)
        for begin, end in zip(begins, ends, strict=True)
    ]
