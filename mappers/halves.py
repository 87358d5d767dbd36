"""Precisions `mixed` (float16) and `bfloat16`: which outputs of a map stand halves, measured on held-out documents.

A half halves what a bundle weighs, and on a GPU the time of a map; sums are taken in float32 throughout. What an output
loses by it is held against what the map misses anyway.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mappers.exact import Target
from mappers.manifest import KINDS, MEASURED, Manifest
from mappers.mapper import Mapper
from mappers.models import read
from mappers.plan import weight_name

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
