"""The tensors of a bundle: from solutions to stored precision, and back to one float64 matrix per output."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mappers.errors import MapperError
from mappers.manifest import COPY, KINDS, MEASURED, Block, Kind, Manifest, Precision, Target, weight_name
from mappers.mapper import Mapper
from mappers.methods import Layout, Solution
from mappers.methods.base import spread
from mappers.models import prefill

MAX_ADDED_ERROR = 0.01  # share of an output's squared error that half precision may add


def tensors_of(layer: int, kind: Kind, solution: Solution, precision: Precision) -> dict[str, Tensor]:
    """Return one output's tensors by name, in float32 if the precision is chosen later by `halve_where_safe`.

    Raises `MapperError` for a weight that overflows the precision.
    """
    dtype = torch.float16 if precision == "float16" else torch.float32
    parts = {weight_name(layer, kind, part): _cast(tensor, dtype) for part, tensor in solution.parts().items()}
    return {**parts, weight_name(layer, kind, "bias"): _cast(solution.bias, torch.float32)}


@torch.no_grad()
def halve_where_safe(
    manifest: Manifest, weights: Mapping[str, Tensor], models: tuple[Any, Any], sample: Sequence[list[int]]
) -> dict[str, Tensor]:
    """Store matrices in half precision where that adds little error on the documents `sample`.

    For precisions `mixed` (float16) and `bfloat16`. Both features and weights are rounded; sums stay float32. Half
    precision halves a bundle's size and, on a GPU, the time of a map. Without documents all of `weights` (float32) are
    returned as they are.
    """
    head = manifest.calibration.head
    outputs: list[Target] = [(kind, i) for i in range(len(manifest.layers)) for kind in KINDS]
    half = MEASURED[manifest.precision]
    halved = {
        name: tensor.to(half) if name.endswith((".weight", ".up")) else tensor for name, tensor in weights.items()
    }
    device = str(models[0].device)
    full, rounded = Mapper(manifest, weights, device), Mapper(manifest, halved, device, halves=True)
    # 1. Squared error of the map, and what rounding adds to it.
    added: dict[Target, float] = defaultdict(float)
    error: dict[Target, float] = defaultdict(float)
    for ids in sample:
        source, native = (prefill(model, ids).slice(head, len(ids)) for model in models)
        caches = full.map(source), rounded.map(source), native
        for kind, layer in outputs:
            exact, rough, true = (cache.of(kind)[layer] for cache in caches)
            added[kind, layer] += float((rough - exact).square().sum())
            error[kind, layer] += float((exact - true).square().sum())
    # 2. The outputs that tolerate it.
    safe = {target for target in outputs if sample and added[target] <= MAX_ADDED_ERROR * error[target]}
    names = {weight_name(layer, kind, part) for kind, layer in safe for part in ("weight", "up")}
    return {name: halved[name] if name in names else tensor for name, tensor in weights.items()}


@dataclass(frozen=True)
class WholeOutput:
    """One output as stored: features of `blocks` @ weight @ up + bias, in float64.

    `up` is None unless the weight is stored as two factors.
    """

    blocks: tuple[Block, ...]
    weight: Tensor
    bias: Tensor
    up: Tensor | None = None

    @classmethod
    def of(cls, mapper: Mapper, layer: int, kind: Kind) -> WholeOutput:
        manifest, spec = mapper.manifest, mapper.manifest.layers[layer].of(kind)
        if spec.method == COPY:
            width = manifest.target.geometry.width
            return cls(spec.blocks, torch.eye(width, dtype=torch.float64), torch.zeros(width, dtype=torch.float64))
        weight, bias = (mapper.weights[weight_name(layer, kind, part)].double() for part in ("weight", "bias"))
        if spec.heads:
            weight = spread(Layout.between(manifest.source.geometry, manifest.target.geometry), spec.heads, weight)
        up = mapper.weights[weight_name(layer, kind, "up")].double() if spec.rank else None
        return cls(spec.blocks, weight, bias, up)

    def rows(self, block: Block) -> Tensor:
        """Return the rows of the weight for one block, zeros if the block is not used."""
        width = len(self.weight) // len(self.blocks)
        if block not in self.blocks:
            return self.weight.new_zeros(width, self.weight.shape[1])
        at = self.blocks.index(block)
        return self.weight[at * width : (at + 1) * width]

    @property
    def multiplied(self) -> WholeOutput:
        """The same output with a single matrix."""
        return self if self.up is None else WholeOutput(self.blocks, self.weight @ self.up, self.bias)


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    cast = tensor.to(dtype).cpu()
    if not cast.isfinite().all():
        raise MapperError(f"a weight of {float(tensor.abs().max()):.3g} is too large for {dtype}; allowed: float32")
    return cast
