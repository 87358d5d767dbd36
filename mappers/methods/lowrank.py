"""`lowrank`: ridge regression through a bottleneck, the dial between quality and size."""

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
    """Reduced-rank regression (Izenman 1975) of a ridge solution B, stored and applied as two factors.

        down = B V_r,    up = V_r',    V_r the first r eigenvectors of B'X'Y

    which of all maps of rank r loses least on the data that B was fitted to. `rank` is the same for every output, or
    if None each output's own: the smallest that takes no more than the share `tolerance` onto B's unexplained variance
    on held-out moments. Where two factors would not be smaller than B, B itself is taken.
    """

    rank: int | None = None
    tolerance: float = 0.02
    ridges: Sequence[float] = RIDGES
    tokens_per_feature: float = 4.0

    name = "lowrank"

    def __post_init__(self) -> None:
        if self.rank is not None and self.rank < 1:
            raise MapperError(f"rank is {self.rank}; allowed: 1 and more")
        if self.tolerance < 0:
            raise MapperError(f"tolerance is {self.tolerance}; allowed: 0 and more")

    @property
    def rough(self) -> Ridge:
        return Ridge(self.ridges, self.tokens_per_feature)

    def tokens_needed(self, num_features: int, layout: Layout) -> int:
        return self.rough.tokens_needed(num_features, layout)

    def solve(self, train: Moments, layout: Layout, held_out: Moments | None = None) -> Solution:
        full = self.rough.solve(train, layout, held_out)
        directions = _directions(full, train)
        judged = held_out or train
        rank = self.rank or _smallest_rank(_losses(full, directions, train, judged), self.tolerance, judged.resolution)
        return _cut(full, directions, rank, train)

    def refit(self, solution: Solution, moments: Moments, layout: Layout) -> Solution:
        full = self.rough.refit(solution, moments, layout)
        rank = solution.structure().get("rank", moments.num_targets)
        return _cut(full, _directions(full, moments), rank, moments)


def _directions(full: Solution, train: Moments) -> Tensor:
    """(q, q): orthogonal directions of the targets, those that the map explains most of first."""
    fitted = full.weight.T @ train.xy
    directions: Tensor = torch.linalg.eigh((fitted + fitted.T) / 2)[1]
    return directions.flip(1)


def _cut(full: Solution, directions: Tensor, rank: int, train: Moments) -> Solution:
    features, targets = full.weight.shape
    if rank * (features + targets) >= features * targets:
        return full
    up = directions[:, :rank].T.contiguous()
    down = full.weight @ up.T
    weight = down @ up
    return FactoredSolution(weight, train.mean_y - train.mean_x @ weight, full.ridge, down=down, up=up)


def _losses(full: Solution, directions: Tensor, train: Moments, judged: Moments) -> Tensor:
    """Squared error on `judged` of the map cut to rank 1, 2, ..., q: in orthogonal directions, losses add up."""
    dx, dy = judged.mean_x - train.mean_x, judged.mean_y - train.mean_y
    # Moments of `judged` about the means of `train`, along the directions.
    weight = full.weight @ directions
    shift = dx @ weight
    cross = (weight * (judged.xy @ directions)).sum(0) + judged.mass * shift * (dy @ directions)
    power = (weight * (judged.gram() @ weight)).sum(0) + judged.mass * shift.square()
    nothing = judged.yy.sum() + judged.mass * dy.square().sum()
    return nothing - (2 * cross - power).cumsum(0)


def _smallest_rank(losses: Tensor, tolerance: float, resolution: float) -> int:
    good = losses <= (1 + tolerance) * losses[-1] + max(1e-12, resolution) * losses[0]
    return int(good.nonzero()[0]) + 1
