"""Which source layers a target layer is computed from: as few as explain as much on held-out documents."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mappers.collect import Group
from mappers.errors import CalibrationTooSmall
from mappers.methods import Method, Solution

WORTH = 0.01  # more layers must take at least this share off the unexplained variance


@dataclass(frozen=True)
class Choice:
    """The source layers of one target layer, ascending, with the map from them and its R² on held-out documents."""

    layers: tuple[int, ...]
    solution: Solution
    r2: float


def choose_all(method: Method, group: Group, max_layers: int) -> list[Choice]:
    """A choice for every target of the group."""
    if group.held_out.count == 0:
        raise CalibrationTooSmall("one document; at least 2 are needed, to judge a fit on what it has not seen")
    ranking = rank_layers(method, group)
    most = min(max_layers, group.source.num_layers, method.max_layers or max_layers)
    return [_choose(method, group, index, ranking[:, index].tolist(), most) for index in range(len(group.targets))]


def rank_layers(method: Method, group: Group) -> Tensor:
    """Held-out R² of each source layer alone, (source layers, targets): one solve a source layer serves all targets."""
    everything = torch.arange(group.train.num_targets, device=group.train.xx.device)
    rows = []
    for layer in range(group.source.num_layers):
        features = group.features([layer])
        held_out = group.held_out.select(features, everything)
        lost = method.solve(group.train.select(features, everything), held_out).lost(held_out)
        rows.append(1 - _a_target(lost, group) / _a_target(held_out.yy, group).clamp_min(1e-300))
    return torch.stack(rows)


def _choose(method: Method, group: Group, index: int, r2_alone: list[float], most: int) -> Choice:
    ranked = sorted(range(len(r2_alone)), key=lambda layer: -r2_alone[layer])
    choices = [_solved(method, group, index, tuple(sorted(ranked[:k]))) for k in range(1, most + 1)]
    least_lost = min(1 - choice.r2 for choice in choices)
    return next(choice for choice in choices if 1 - choice.r2 <= (1 + WORTH) * least_lost + 1e-12)


def _solved(method: Method, group: Group, index: int, layers: tuple[int, ...]) -> Choice:
    features, targets = group.features(layers), group.outputs(index)
    held_out = group.held_out.select(features, targets)
    solution = method.solve(group.train.select(features, targets), held_out)
    return Choice(layers, solution, solution.r2(held_out))


def _a_target(per_column: Tensor, group: Group) -> Tensor:
    return per_column.view(len(group.targets), -1).sum(1)
