"""The caches that an evaluation compares: what is served, and the controls that tell whether it means anything.

    native          the target's own cache
    mapped          mapped, the head native; read on from the last prefix token
    hybrid          as served: mapped, head and tail native
    wrong_document  as hybrid, but mapped from another document
    random_mapper   as hybrid, by random weights of the same size
    raw_source      as hybrid, the source's keys and values as they are, layers matched by depth
    no_cache        head and tail only
    source_alone    the source model itself, with its own cache
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mappers.cache import KVCache, KVGeometry
from mappers.errors import MapperError
from mappers.manifest import COPY, KINDS, Kind, LayerSpec, OutputSpec
from mappers.mapper import Mapper
from mappers.plan import weight_name

RANDOM = "random"


@dataclass(frozen=True)
class Caches:
    """The caches of one document, each from token 0 on (`wrong` from another one); None where there can be none, and
    where controls are not asked for."""

    native: KVCache
    mapped: KVCache
    wrong: KVCache | None = None
    random: KVCache | None = None
    raw: KVCache | None = None


@dataclass(frozen=True)
class Arm:
    """`cache` picks what stands behind the native head; `native_tail` tells whether the tail is read natively.

    A control is judged on some of the documents only. One that is `shared` does not depend on the mapper.
    """

    name: str
    cache: Callable[[Caches], KVCache | None]
    native_tail: bool = True
    control: bool = True
    shared: bool = False


# The three that no map and no source cache takes part in are treated apart.
CACHE_ARMS = (
    Arm("mapped", lambda caches: caches.mapped, native_tail=False, control=False),
    Arm("hybrid", lambda caches: caches.mapped, control=False),
    Arm("wrong_document", lambda caches: caches.wrong),
    Arm("random_mapper", lambda caches: caches.random),
    Arm("raw_source", lambda caches: caches.raw, shared=True),
)
ARMS = ("native", *(arm.name for arm in CACHE_ARMS), "no_cache", "source_alone")
ESSENTIAL = ("native", "mapped", "hybrid", "no_cache", "source_alone")  # where bundles are compared with one another


def check_arms(names: Sequence[str]) -> None:
    """Raise `MapperError` for a name that no arm has."""
    unknown = [name for name in names if name not in ARMS]
    if unknown:
        raise MapperError(f"unknown arm {unknown[0]!r}; known: {', '.join(ARMS)}")


def randomised(mapper: Mapper, seed: int = 0) -> Mapper:
    """The same mapper with random weights: of the fitted ones' spread, or where layers are copied, of unit gain."""
    generator = torch.Generator().manual_seed(seed)
    weights = dict(mapper.weights)
    width = mapper.manifest.source.geometry.width
    for layer, spec in enumerate(mapper.manifest.layers):
        for kind in KINDS:
            bias = weight_name(layer, kind, "bias")
            if spec.of(kind).method == COPY:
                drawn = torch.randn(width, width, generator=generator) / width**0.5
                weights |= {weight_name(layer, kind, "weight"): drawn, bias: torch.zeros(width)}
            for name in _matrices(mapper, layer, kind):
                fitted = weights[name].float()
                weights[name] = torch.randn(fitted.shape, generator=generator) * fitted.square().mean().sqrt()
    layers = tuple(LayerSpec(keys=_random(spec.keys), values=_random(spec.values)) for spec in mapper.manifest.layers)
    return Mapper(mapper.manifest.model_copy(update={"layers": layers}), weights, str(mapper.device))


def raw(source: KVCache, target: KVGeometry) -> KVCache | None:
    """The source's tensors in the target's places, layers and heads matched by their relative index; None if the heads
    differ in size."""
    geometry = source.geometry
    if geometry.head_dim != target.head_dim:
        return None
    layers = _spread(geometry.num_layers, target.num_layers)
    heads = torch.tensor(_spread(geometry.num_kv_heads, target.num_kv_heads), device=source.keys[0].device)

    def placed(states: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(states[layer][heads] for layer in layers)

    return KVCache(placed(source.keys), placed(source.values), source.start)


def _matrices(mapper: Mapper, layer: int, kind: Kind) -> list[str]:
    """Names of the tensors that a layer's features are multiplied with: all that it has but the bias."""
    prefix, bias = weight_name(layer, kind, ""), weight_name(layer, kind, "bias")
    return sorted(name for name in mapper.weights if name.startswith(prefix) and name != bias)


def _random(spec: OutputSpec) -> OutputSpec:
    return spec.model_copy(update={"method": RANDOM})


def _spread(have: int, want: int) -> list[int]:
    """For each of `want` places, which of `have` stands at the same relative depth."""
    return [round(i * (have - 1) / max(1, want - 1)) for i in range(want)]
