"""Finds target layers whose keys or values equal those of a source layer, as when a pruned sibling keeps its layers.

Such layers are copied: nothing is fitted, stored or multiplied for them.
"""

from __future__ import annotations

from torch import Tensor

from mappers.cache import KVCache
from mappers.errors import MapperError
from mappers.manifest import KINDS, Target

TOLERANCE = 1e-5  # relative; float32 states of equal arithmetic may differ this much between runs
SAMPLE_TOKENS = 64


class CopyFinder:
    """Source layer of each copied target (`copies`), found in the first document and verified on all others."""

    def __init__(self, copies: dict[Target, int]):
        self.copies = copies
        self.lost = dict.fromkeys(copies, 0.0)  # sum of squared differences
        self.power = dict.fromkeys(copies, 0.0)  # sum of squares

    @classmethod
    def of(cls, first_source: KVCache, first_target: KVCache) -> CopyFinder:
        """Search the last tokens of the first document's caches for equal layers."""
        begin = max(0, first_source.num_tokens - SAMPLE_TOKENS)
        end = first_source.num_tokens
        return cls(_equal_layers(first_source.slice(begin, end), first_target.slice(begin, end)))

    def update(self, source: KVCache, target: KVCache) -> None:
        for (kind, layer), source_layer in self.copies.items():
            wanted, copied = target.of(kind)[layer], source.of(kind)[source_layer]
            self.lost[kind, layer] += float((wanted - copied).float().square().sum())
            self.power[kind, layer] += float(wanted.float().square().sum())

    def confirm(self) -> None:
        """Raise `MapperError` if a layer that was a copy in the first document differs over all documents."""
        for (kind, layer), source_layer in self.copies.items():
            error = (self.lost[kind, layer] / max(self.power[kind, layer], 1e-300)) ** 0.5
            if error > TOLERANCE:
                raise MapperError(
                    f"the {kind} of target layer {layer} equal those of source layer {source_layer} in the first "
                    f"document, but differ by {error:.1e} over all; allowed: copies=False (kvrelay fit --no-copies)"
                )


def _equal_layers(source: KVCache, target: KVCache) -> dict[Target, int]:
    if source.keys[0].shape != target.keys[0].shape:
        return {}
    found: dict[Target, int] = {}
    for kind in KINDS:
        for layer, states in enumerate(target.of(kind)):
            errors = [_relative_error(states, candidate) for candidate in source.of(kind)]
            best = min(range(len(errors)), key=errors.__getitem__)
            if errors[best] < TOLERANCE:
                found[kind, layer] = best
    return found


def _relative_error(states: Tensor, candidate: Tensor) -> float:
    return float((states - candidate).norm() / states.norm().clamp_min(1e-30))
