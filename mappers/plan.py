"""How one chunk of tokens is mapped: the arithmetic of a bundle, laid out for speed.

    source chunk ──strip──►  keys   (T, C)  one column block of width w for each source layer that is needed
                 ──copy───►  values (T, C)
    target layer t:  out (T, W) = bias + Σ over runs of neighbouring blocks: features[:, run] @ weight
                     keys: RoPE applied;  both handed out as (H, T, D) views of token-major memory

Neighbouring source layers are one matmul on a slice, so features are never gathered. A factored weight is two thin
matmuls, one matched by heads is small ones, from a source head's columns to a target head's. Weights that are kept as
halves multiply features rounded to halves; all sums are float32. Scratch is bounded by the chunk.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mappers.cache import KVCache
from mappers.errors import BundleCorrupt
from mappers.manifest import COPY, KINDS, Kind, Manifest
from mappers.rope import Factors, Rope, inverse, rotate

Block = tuple[Kind, int]  # column block of a feature matrix
Features = Mapping[Kind, Sequence[int]]  # the source layers that stand in the feature matrix of each kind, ascending


class Workspace:
    """Scratch of one thread, reused from chunk to chunk and grown when a longer one comes."""

    def __init__(self, manifest: Manifest, device: torch.device):
        self._features, self._rank = features_of(manifest), rank_of(manifest)
        self._source, self._target = manifest.source.geometry, manifest.target.geometry
        self._device = device
        self._num_tokens = 0
        self._buffers: dict[str, Tensor] = {}

    def begin(self, chunk: KVCache, source_rope: Rope, target_rope: Rope) -> Chunk:
        """Strip and lay out one chunk of the source's cache."""
        if chunk.num_tokens > self._num_tokens:
            self._allocate(chunk.num_tokens)
        work = Chunk(chunk, {name: buffer[: chunk.num_tokens] for name, buffer in self._buffers.items()})
        span = (chunk.start, chunk.num_tokens, self._device)
        strip = [inverse(*factors) for factors in source_rope.span(*span)]
        work.set_ropes(_by_layer(strip, source_rope), _by_layer(target_rope.span(*span), target_rope))
        for kind in KINDS:
            work.lay_out(kind, self._features[kind])
        return work

    @property
    def num_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def _allocate(self, num_tokens: int) -> None:
        def empty(heads: int, dim: int) -> Tensor:
            return torch.empty(num_tokens, heads, dim, device=self._device)

        source, target = self._source, self._target
        for kind in KINDS:
            blocks = len(self._features[kind])
            self._buffers[f"{kind}.features"] = empty(blocks * source.num_kv_heads, source.head_dim)
            self._buffers[f"{kind}.out"] = empty(target.num_kv_heads, target.head_dim)
        self._buffers["rotated"] = empty(target.num_kv_heads, target.head_dim)
        self._buffers["inner"] = torch.empty(num_tokens, self._rank, device=self._device)
        self._num_tokens = num_tokens


class Chunk:
    """One chunk being mapped: the source's tensors, the features made of them, and where outputs go."""

    def __init__(self, source: KVCache, buffers: dict[str, Tensor]):
        self.source = source
        self._buffers = buffers
        self._rounded: dict[Kind, Tensor] = {}

    def set_ropes(self, strip: Sequence[Factors], apply: Sequence[Factors]) -> None:
        """What takes RoPE off the keys of each source layer, and what puts it on those of each target layer."""
        self._strip, self._apply = strip, apply  # (T, 1, R)

    def lay_out(self, kind: Kind, layers: Sequence[int]) -> None:
        """Fill the feature matrix of one kind from these source layers."""
        heads = self.source.geometry.num_kv_heads
        for block, layer in enumerate(layers):
            out = self._buffers[f"{kind}.features"][:, block * heads : (block + 1) * heads]  # (T, H, D)
            states = self.source.of(kind)[layer].transpose(0, 1)  # (T, H, D)
            if kind == "keys":
                rotate(states.to(out.device, torch.float32), *self._strip[layer], out)
            else:
                out.copy_(states)

    def features(self, kind: Kind, dtype: torch.dtype) -> Tensor:
        """(T, C): stripped keys or values of the needed source layers side by side, as float32 or float16."""
        features = self._buffers[f"{kind}.features"].flatten(1)
        if dtype == torch.float32:
            return features
        if kind not in self._rounded:
            self._rounded[kind] = features.to(dtype)
        return self._rounded[kind]

    def out(self, kind: Kind) -> Tensor:
        """(T, W): where a target layer's output of this kind is written."""
        return self._buffers[f"{kind}.out"].flatten(1)

    def inner(self, rank: int) -> Tensor:
        """(T, rank): what stands between two factors."""
        return self._buffers["inner"][:, :rank]

    def finished(self, kind: Kind, layer: int) -> Tensor:
        """What `out` holds as a target layer's cache wants it: (H, T, D), keys with RoPE."""
        states = self._buffers[f"{kind}.out"]
        if kind == "keys":
            states = rotate(states, *self._apply[layer], self._buffers["rotated"])
        return states.transpose(0, 1)


class Output(ABC):
    """Makes one target layer's keys or values of a chunk."""

    @abstractmethod
    def of(self, chunk: Chunk) -> Tensor:
        """(H, T, D); a view of scratch or of the source, valid until the next output of its kind."""


@dataclass(frozen=True)
class Copied(Output):
    kind: Kind
    source_layer: int

    def of(self, chunk: Chunk) -> Tensor:
        return chunk.source.of(self.kind)[self.source_layer]


@dataclass(frozen=True)
class Run:
    """Columns `[begin, end)` of one feature matrix, times `weight` (end - begin, w), for columns `[at, at + w)` of a
    matrix; plus `bias` (w,), or without one to what stands there already."""

    kind: Kind
    begin: int
    end: int
    weight: Tensor
    at: int = 0
    bias: Tensor | None = None

    def add_to(self, out: Tensor, chunk: Chunk) -> None:
        part = out[:, self.at : self.at + self.weight.shape[1]]
        addend = part if self.bias is None else self.bias
        features = chunk.features(self.kind, self.weight.dtype)
        add_product(addend, features[:, self.begin : self.end], self.weight, part)


@dataclass(frozen=True)
class Linear(Output):
    kind: Kind
    layer: int  # of the target
    runs: tuple[Run, ...]

    def of(self, chunk: Chunk) -> Tensor:
        out = chunk.out(self.kind)
        for run in self.runs:
            run.add_to(out, chunk)
        return chunk.finished(self.kind, self.layer)


@dataclass(frozen=True)
class Factored(Output):
    """`runs` lead to (T, r), and `up` (r, W) from there."""

    kind: Kind
    layer: int  # of the target
    runs: tuple[Run, ...]
    up: Tensor
    bias: Tensor  # (W,)

    def of(self, chunk: Chunk) -> Tensor:
        inner = chunk.inner(len(self.up))
        for run in self.runs:
            run.add_to(inner, chunk)
        add_product(self.bias, inner.to(self.up.dtype), self.up, chunk.out(self.kind))
        return chunk.finished(self.kind, self.layer)


def features_of(manifest: Manifest) -> Features:
    """The source layers whose keys, and whose values, some target layer is computed from."""
    needed: dict[Kind, set[int]] = {"keys": set(), "values": set()}
    for layer in manifest.layers:
        for spec in (layer.keys, layer.values):
            if spec.method != COPY:
                needed["keys"].update(spec.key_layers)
                needed["values"].update(spec.value_layers)
    return {kind: sorted(layers) for kind, layers in needed.items()}


def rank_of(manifest: Manifest) -> int:
    """The largest rank of a factored output."""
    return max(spec.of(kind).rank or 0 for spec in manifest.layers for kind in KINDS)


def add_product(addend: Tensor, left: Tensor, right: Tensor, out: Tensor) -> None:
    """addend + left (n, p) @ right (p, q) into `out`. Factors are both float32 or both float16; sums are float32."""
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


def weight_name(layer: int, kind: Kind, part: str) -> str:
    return f"layers.{layer}.{kind}.{part}"


class _OutputMaker:
    def __init__(self, manifest: Manifest, weights: Mapping[str, Tensor], halves: bool):
        self._manifest, self._weights, self._halves = manifest, weights, halves
        self._source, self._target = manifest.source.geometry, manifest.target.geometry
        self._features = features_of(manifest)

    def make(self, layer: int, kind: Kind) -> Output:
        spec = self._manifest.layers[layer].of(kind)
        if spec.method == COPY:
            return Copied(kind, *(spec.key_layers if kind == "keys" else spec.value_layers))
        blocks: list[Block] = [("keys", self._features["keys"].index(i)) for i in spec.key_layers]
        blocks += [("values", self._features["values"].index(i)) for i in spec.value_layers]
        bias = self._tensor(weight_name(layer, kind, "bias"), (self._target.width,))
        name = weight_name(layer, kind, "weight")
        width_in = self._source.width
        if spec.heads:
            return Linear(kind, layer, tuple(self._head_runs(name, blocks, spec.heads, bias)))
        if spec.rank is None:
            weight = self._tensor(name, (len(blocks) * width_in, self._target.width))
            return Linear(kind, layer, tuple(_runs(blocks, weight, width_in, bias)))
        down = self._tensor(name, (len(blocks) * width_in, spec.rank))
        up = self._tensor(weight_name(layer, kind, "up"), (spec.rank, self._target.width))
        return Factored(kind, layer, tuple(_runs(blocks, down, width_in, bias.new_zeros(spec.rank))), up, bias)

    def _head_runs(
        self, name: str, blocks: list[Block], heads: tuple[tuple[int, ...], ...], bias: Tensor
    ) -> Iterator[Run]:
        """For every target head, the matched source head's columns of each block."""
        source, target = self._source, self._target
        if len(heads) != target.num_kv_heads or any(len(chosen) != len(blocks) for chosen in heads):
            raise BundleCorrupt(f"{name}: heads {heads}; need {len(blocks)} for each of {target.num_kv_heads}")
        if any(not 0 <= head < source.num_kv_heads for chosen in heads for head in chosen):
            raise BundleCorrupt(f"{name}: heads {heads}; the source has {source.num_kv_heads}")
        weight = self._tensor(name, (len(heads), len(blocks) * source.head_dim, target.head_dim))
        for index, chosen in enumerate(heads):
            at = index * target.head_dim
            rows = weight[index].tensor_split(len(blocks))
            for row, (kind, block), head in zip(rows, blocks, chosen, strict=True):
                begin = block * source.width + head * source.head_dim
                first = row is rows[0]
                yield Run(kind, begin, begin + source.head_dim, row, at, bias[at : at + len(row[0])] if first else None)

    def _tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        found = self._weights.get(name)
        if found is None or tuple(found.shape) != shape:
            held = None if found is None else tuple(found.shape)
            raise BundleCorrupt(f"tensor {name!r}: the manifest asks for {shape}, the weights hold {held}")
        kept = self._halves and found.dtype == torch.float16
        return (found if kept else found.float()).contiguous()


def _by_layer(tables: Sequence[Factors], rope: Rope) -> list[Factors]:
    """For each layer its table, shaped to turn all heads alike: (T, 1, R); layers share what is the same."""
    shaped = [(cos.unsqueeze(1), sin.unsqueeze(1)) for cos, sin in tables]
    return [shaped[table] for table in rope.tables]


def _runs(blocks: list[Block], weight: Tensor, width: int, bias: Tensor) -> list[Run]:
    """Feature blocks with their rows of `weight`, neighbours joined; the first brings the bias."""
    runs: list[Run] = []
    for row, (kind, block) in enumerate(blocks):
        begin, end, first = block * width, (block + 1) * width, row * width
        if runs and runs[-1].kind == kind and runs[-1].end == begin:
            begin = runs.pop().begin
            first = (row + 1) * width - (end - begin)
        runs.append(Run(kind, begin, end, weight[first : (row + 1) * width], bias=None if runs else bias))
    return runs
