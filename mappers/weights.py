"""From a solution to the tensors of a bundle, and from these back to one matrix, whatever form they have."""

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
from mappers.models import read


def stored(layer: int, kind: Kind, solution: Solution, precision: Precision) -> dict[str, Tensor]:
    """The tensors of one output by name; whole as yet where it is to be measured what halves cost.

    Raises `MapperError` for a weight that the precision can't hold.
    """
    dtype = torch.float16 if precision == "float16" else torch.float32
    parts = {weight_name(layer, kind, part): _cast(tensor, dtype) for part, tensor in solution.parts().items()}
    return {**parts, weight_name(layer, kind, "bias"): _cast(solution.bias, torch.float32)}


@dataclass(frozen=True)
class WholeOutput:
    """One output as a bundle holds it: output = features of `blocks` @ weight @ up + bias, in float64.

    `up` is None unless the weight is stored as two factors.
    """

    blocks: tuple[Block, ...]
    weight: Tensor
    bias: Tensor
    up: Tensor | None = None

    @classmethod
    def of(cls, mapper: Mapper, layer: int, kind: Kind) -> WholeOutput:
        spec = mapper.manifest.layers[layer].of(kind)
        blocks = spec.blocks
        if spec.method == COPY:
            width = mapper.manifest.target.geometry.width
            return cls(blocks, torch.eye(width, dtype=torch.float64), torch.zeros(width, dtype=torch.float64))
        weight, bias = (_tensor(mapper.weights, layer, kind, part) for part in ("weight", "bias"))
        if spec.heads:
            weight = spread(layout_of(mapper), spec.heads, weight)
        return cls(blocks, weight, bias, _tensor(mapper.weights, layer, kind, "up") if spec.rank else None)

    def rows(self, block: Block) -> Tensor:
        """The part of the weight that multiplies a block; zeros for one that is not used."""
        width = len(self.weight) // len(self.blocks)
        if block not in self.blocks:
            return self.weight.new_zeros(width, self.weight.shape[1])
        at = self.blocks.index(block)
        return self.weight[at * width : (at + 1) * width]

    @property
    def multiplied(self) -> WholeOutput:
        """With a single matrix."""
        return self if self.up is None else WholeOutput(self.blocks, self.weight @ self.up, self.bias)


def layout_of(mapper: Mapper) -> Layout:
    source, target = mapper.manifest.source.geometry, mapper.manifest.target.geometry
    return Layout(source.num_kv_heads, source.head_dim, target.num_kv_heads, target.head_dim)


def _tensor(weights: Mapping[str, Tensor], layer: int, kind: Kind, part: str) -> Tensor:
    return weights[weight_name(layer, kind, part)].double()


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    cast = tensor.to(dtype).cpu()
    if not cast.isfinite().all():
        raise MapperError(f"a weight of {float(tensor.abs().max()):.3g} is too large for {dtype}; allowed: float32")
    return cast


ADDED = 0.01  # of an output's squared error: so much may halves add


@torch.no_grad()
def mixed(
    manifest: Manifest, weights: Mapping[str, Tensor], models: tuple[Any, Any], sample: Sequence[list[int]]
) -> dict[str, Tensor]:
    """`weights` (float32) with those halved that bear it, in features and weights, on these documents.

    Without a document nothing is halved.
    """
    head = manifest.calibration.head
    outputs: list[Target] = [(kind, i) for i in range(len(manifest.layers)) for kind in KINDS]
    half = MEASURED[manifest.precision]
    halved = {name: tensor.to(half) if _is_matrix(name) else tensor for name, tensor in weights.items()}
    device = str(models[0].device)
    whole, halves = Mapper(manifest, weights, device), Mapper(manifest, halved, device, halves=True)
    added: dict[Target, float] = defaultdict(float)
    missed: dict[Target, float] = defaultdict(float)
    for ids in sample:
        source, target = (read(model, ids).slice(head, len(ids)) for model in models)
        exact, rounded = whole.map(source), halves.map(source)
        for kind, layer in outputs:
            found, rough, true = (cache.of(kind)[layer] for cache in (exact, rounded, target))
            added[kind, layer] += float((rough - found).square().sum())
            missed[kind, layer] += float((found - true).square().sum())
    bearing = {target for target in outputs if sample and added[target] <= ADDED * missed[target]}
    names = {weight_name(layer, kind, part) for kind, layer in bearing for part in ("weight", "up")}
    return {name: halved[name] if name in names else tensor for name, tensor in weights.items()}


def _is_matrix(name: str) -> bool:
    return name.endswith((".weight", ".up"))
