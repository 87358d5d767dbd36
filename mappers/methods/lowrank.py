"""`lowrank`: ridge regression through a bottleneck, which trades quality for size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mappers.errors import MapperError
from mappers.methods.base import FactoredSolution, Layout, Method, Solution
from mappers.methods.ridge import RIDGES, Ridge
from mappers.stats import Moments


@dataclass(frozen=True)
class LowRankRidge(Method):
    """Reduced-rank regression of a ridge solution B, stored and applied as two factors.

    Izenman 1975, https://doi.org/10.1016/0047-259X(75)90042-1:

        down = B V_r,    up = V_r',    V_r the first r eigenvectors of B'X'Y

    Of all maps of rank r this one loses least on the data of B. `rank` applies to every output; with None each output
    has its own, the smallest that adds at most the share `tolerance` to B's unexplained variance on held-out moments.
    Where two factors are not smaller than B, B itself is used.
    """

    rank: int | None = None
    tolerance: float = 0.02
    ridges: Sequence[float] = RIDGES
    tokens_per_feature: float = 4.0

    name = "lowrank"

    def __post_init__(self) -> None:
        if self.rank is not None and self.rank < 1:
            raise MapperError(f"rank is {self.rank}; allowed: 1 or more")
        if self.tolerance < 0:
            raise MapperError(f"tolerance is {self.tolerance}; allowed: 0 or more")

    @property
    def rough(self) -> Ridge:
        return Ridge(self.ridges, self.tokens_per_feature)

    def tokens_needed(self, num_features: int, layout: Layout) -> int:
        return self.rough.tokens_needed(num_features, layout)

    def solve(self, train: Moments, layout: Layout, held_out: Moments | None = None) -> Solution:
        full = self.rough.solve(train, layout, held_out)
        directions = _directions(full, train)
        scored = held_out or train
        rank = self.rank or _smallest_rank(_losses(full, directions, train, scored), self.tolerance, scored.resolution)
        return _truncate(full, directions, rank, train)

    def refit(self, solution: Solution, moments: Moments, layout: Layout) -> Solution:
        full = self.rough.refit(solution, moments, layout)
        rank = solution.structure().get("rank", moments.num_targets)
        return _truncate(full, _directions(full, moments), rank, moments)


def _directions(full: Solution, train: Moments) -> Tensor:
    """Return (q, q): orthogonal directions of the targets, best explained first."""
    fitted = full.weight.T @ train.xy
    directions: Tensor = torch.linalg.eigh((fitted + fitted.T) / 2)[1]
    return directions.flip(1)


def _truncate(full: Solution, directions: Tensor, rank: int, train: Moments) -> Solution:
    features, targets = full.weight.shape
    if rank * (features + targets) >= features * targets:
        return full
    up = directions[:, :rank].T.contiguous()
    down = full.weight @ up.T
    weight = down @ up
    return FactoredSolution(weight, train.mean_y - train.mean_x @ weight, full.ridge, down=down, up=up)


def _losses(full: Solution, directions: Tensor, train: Moments, scored: Moments) -> Tensor:
    """Return the squared error on `scored` for ranks 1, 2, ..., q. Losses in orthogonal directions add up."""
    dx, dy = scored.mean_x - train.mean_x, scored.mean_y - train.mean_y
    # Moments of `scored` about the means of `train`, along the directions.
    weight = full.weight @ directions
    shift = dx @ weight
    cross = (weight * (scored.xy @ directions)).sum(0) + scored.mass * shift * (dy @ directions)
    power = (weight * (scored.gram() @ weight)).sum(0) + scored.mass * shift.square()
    total = scored.yy.sum() + scored.mass * dy.square().sum()
    return total - (2 * cross - power).cumsum(0)


def _smallest_rank(losses: Tensor, tolerance: float, resolution: float) -> int:
    good = losses <= (1 + tolerance) * losses[-1] + max(1e-12, resolution) * losses[0]
    return int(good.nonzero()[0]) + 1
