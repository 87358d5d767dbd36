"""How one chunk of tokens is mapped: the arithmetic of a bundle, laid out for speed.

    source chunk ──strip──►  keys   (T, C)  one column block of width w for each source layer that is needed
                 ──copy───►  values (T, C)
    target layer t:  out (T, W) = bias + Σ over runs of neighbouring blocks: features[:, run] @ weight
                     keys: RoPE applied;  both handed out as (H, T, D) views of token-major memory

Neighbouring source layers are one matmul on a slice, so features are never gathered. Scratch is bounded by the chunk.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mappers.cache import KVCache, KVGeometry
from mappers.errors import BundleCorrupt
from mappers.manifest import COPY, KINDS, Kind, Manifest
from mappers.rope import Factors, Rope, inverse, rotate

Block = tuple[Kind, int]  # column block of a feature matrix
Features = Mapping[Kind, Sequence[int]]  # the source layers that stand in the feature matrix of each kind, ascending


class Workspace:
    """Scratch of one thread, reused from chunk to chunk and grown when a longer one comes."""

    def __init__(self, features: Features, source: KVGeometry, target: KVGeometry, device: torch.device):
        self._features, self._source, self._target = features, source, target
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

    def _allocate(self, num_tokens: int) -> None:
        def empty(heads: int, dim: int) -> Tensor:
            return torch.empty(num_tokens, heads, dim, device=self._device)

        source, target = self._source, self._target
        for kind in KINDS:
            blocks = len(self._features[kind])
            self._buffers[f"{kind}.features"] = empty(blocks * source.num_kv_heads, source.head_dim)
            self._buffers[f"{kind}.out"] = empty(target.num_kv_heads, target.head_dim)
        self._buffers["rotated"] = empty(target.num_kv_heads, target.head_dim)
        self._num_tokens = num_tokens


class Chunk:
    """One chunk being mapped: the source's tensors, the features made of them, and where outputs go."""

    def __init__(self, source: KVCache, buffers: dict[str, Tensor]):
        self.source = source
        self._buffers = buffers

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

    def features(self, kind: Kind) -> Tensor:
        """(T, C): stripped keys or values of the needed source layers side by side."""
        return self._buffers[f"{kind}.features"].flatten(1)

    def out(self, kind: Kind) -> Tensor:
        """(T, W): where a target layer's output of this kind is written."""
        return self._buffers[f"{kind}.out"].flatten(1)

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
    """Columns `[begin, end)` of one feature matrix, times `weight` (end - begin, W)."""

    kind: Kind
    begin: int
    end: int
    weight: Tensor


@dataclass(frozen=True)
class Linear(Output):
    kind: Kind
    layer: int  # of the target
    runs: tuple[Run, ...]
    bias: Tensor  # (W,)

    def of(self, chunk: Chunk) -> Tensor:
        out = chunk.out(self.kind)
        addend = self.bias
        for run in self.runs:
            addend = torch.addmm(addend, chunk.features(run.kind)[:, run.begin : run.end], run.weight, out=out)
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


def outputs_of(manifest: Manifest, weights: Mapping[str, Tensor]) -> list[tuple[Output, Output]]:
    """Keys' and values' output of every target layer. Raises `BundleCorrupt` where weights and manifest disagree."""
    maker = _OutputMaker(manifest, weights)
    return [(maker.make(i, "keys"), maker.make(i, "values")) for i in range(len(manifest.layers))]


def weight_name(layer: int, kind: Kind, part: str) -> str:
    return f"layers.{layer}.{kind}.{part}"


class _OutputMaker:
    def __init__(self, manifest: Manifest, weights: Mapping[str, Tensor]):
        self._manifest, self._weights = manifest, weights
        self._features = features_of(manifest)

    def make(self, layer: int, kind: Kind) -> Output:
        spec = self._manifest.layers[layer].of(kind)
        if spec.method == COPY:
            return Copied(kind, *(spec.key_layers if kind == "keys" else spec.value_layers))
        width_in, width_out = self._manifest.source.geometry.width, self._manifest.target.geometry.width
        blocks: list[Block] = [("keys", self._features["keys"].index(i)) for i in spec.key_layers]
        blocks += [("values", self._features["values"].index(i)) for i in spec.value_layers]
        weight = self._tensor(weight_name(layer, kind, "weight"), (len(blocks) * width_in, width_out))
        bias = self._tensor(weight_name(layer, kind, "bias"), (width_out,))
        return Linear(kind, layer, tuple(_runs(blocks, weight, width_in)), bias)

    def _tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        found = self._weights.get(name)
        if found is None or tuple(found.shape) != shape:
            held = None if found is None else tuple(found.shape)
            raise BundleCorrupt(f"tensor {name!r}: the manifest asks for {shape}, the weights hold {held}")
        return found.float().contiguous()


def _by_layer(tables: Sequence[Factors], rope: Rope) -> list[Factors]:
    """For each layer its table, shaped to turn all heads alike: (T, 1, R); layers share what is the same."""
    shaped = [(cos.unsqueeze(1), sin.unsqueeze(1)) for cos, sin in tables]
    return [shaped[table] for table in rope.tables]


def _runs(blocks: list[Block], weight: Tensor, width: int) -> list[Run]:
    """Feature blocks with their rows of `weight`, neighbours joined."""
    runs: list[Run] = []
    for row, (kind, block) in enumerate(blocks):
        begin, end, first = block * width, (block + 1) * width, row * width
        if runs and runs[-1].kind == kind and runs[-1].end == begin:
            begin = runs.pop().begin
            first = (row + 1) * width - (end - begin)
        runs.append(Run(kind, begin, end, weight[first : (row + 1) * width]))
    return runs
