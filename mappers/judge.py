"""Judges a map of one layer's keys or values by what it does to the target's attention, on held-out documents.

As when it is served, each query finds the first tokens and those just before it native, and what lies between mapped:

    0      head                 query - NEAR          query
    |native|       mapped        |       native         |

R² says how well keys are predicted, this says how much it matters: a direction that no query looks along costs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mappers.attention import Attending, paid_out, scores_of, watched
from mappers.cache import KVCache, rows_of
from mappers.errors import CalibrationTooSmall
from mappers.exact import Target
from mappers.manifest import Block
from mappers.methods import Solution
from mappers.models import read
from mappers.rope import Rope

NEAR = 64


@dataclass(frozen=True)
class _Sample:
    """One document: the source's position-free cache, and how each layer of the target attends over its own."""

    source: KVCache
    layers: dict[int, Attending]


class Judge:
    """Holds some held-out documents as both models read them. Raises `CalibrationTooSmall` if all are too short."""

    @torch.no_grad()
    def __init__(self, models: tuple[Any, Any], ropes: tuple[Rope, Rope], sample: Sequence[list[int]], head: int):
        self._rope, self._head = ropes[1], head
        self._samples = [self._read(models, ropes[0], ids) for ids in sample if len(ids) > head + NEAR]
        if not self._samples:
            raise CalibrationTooSmall(
                f"no held-out document of more than {head + NEAR} tokens to judge attention by; allowed: longer "
                f"documents, or another way to choose"
            )

    @torch.no_grad()
    def error(self, blocks: Sequence[Block], outputs: Mapping[Target, Solution]) -> float:
        """1 - cosine between the attention's output over mapped and over native states, mean over queries and heads
        (and over `outputs`, each mapped alone)."""
        errors = [
            _cosine_errors(sample.layers[layer], self._mapped(sample, blocks, target, solution), target, self._head)
            for sample in self._samples
            for target, solution in outputs.items()
            for layer in [target[1]]
        ]
        return float(torch.cat(errors).mean())

    def _read(self, models: tuple[Any, Any], rope: Rope, ids: list[int]) -> _Sample:
        heard: dict[int, Attending] = {}
        with watched(models[1], lambda attending: heard.__setitem__(attending.layer, attending)):
            read(models[1], ids)
        return _Sample(rope.stripped(read(models[0], ids)), heard)

    def _mapped(self, sample: _Sample, blocks: Sequence[Block], target: Target, solution: Solution) -> Tensor:
        """(H, T, D): keys with RoPE, or values."""
        states = [sample.source.of(kind)[layer] for kind, layer in blocks]
        features = torch.cat([rows_of(state) for state in states], dim=1)
        rows = (features.double() @ solution.weight + solution.bias).float()
        heads, num_tokens, dim = sample.layers[target[1]].keys.shape
        mapped = rows.view(num_tokens, heads, dim).transpose(0, 1)
        if target[0] == "keys":
            mapped = self._rope.apply(mapped, torch.arange(num_tokens, device=mapped.device), target[1])
        return mapped


def _cosine_errors(native: Attending, mapped: Tensor, target: Target, head: int) -> Tensor:
    """Of every query that has something mapped to look at, all heads in a row."""
    first = head + NEAR
    queries, visible = native.queries[:, first:], native.visible[first:]
    far = torch.ones_like(visible).tril(first - NEAR)  # more than NEAR before the query
    far[:, :head] = False
    scores = scores_of(queries, native.keys, native.scale)
    exact = paid_out(_softmax(scores, visible), native.values)
    if target[0] == "keys":
        theirs = torch.where(far, scores_of(queries, mapped, native.scale), scores)
        ours = paid_out(_softmax(theirs, visible), native.values)
    else:
        weights = _softmax(scores, visible)
        ours = paid_out(weights * far, mapped) + paid_out(weights * ~far, native.values)
    return 1 - torch.cosine_similarity(ours, exact, dim=-1).flatten()


def _softmax(scores: Tensor, visible: Tensor) -> Tensor:
    return scores.masked_fill(~visible, -torch.inf).softmax(-1)
