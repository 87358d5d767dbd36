"""`ridge`: least squares with a penalty relative to the features' own scale."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mappers.errors import CalibrationTooSmall, RankDeficient
from mappers.methods.base import Method, Solution
from mappers.stats import Moments

SMALLEST_PIVOT = 1e-14  # of a Gram with unit diagonal: below, a feature is the sum of others to float64's last bits


class Ridge(Method):
    """Ridge regression in closed form, after arXiv 2608.03893 (top-k source layers, RoPE stripped, bias by centring).

        weight = (X'X + ridge * mean(diag X'X) * I)^-1 X'Y,    bias = mean(y) - mean(x) weight

    solved by Cholesky in float64 after scaling the Gram to a unit diagonal. The penalty is relative, because an
    absolute one means something else for every number of tokens. Of several, the best on held-out moments is taken;
    without any, the middle one.
    Fewer than `tokens_per_feature` tokens a feature are refused: they overfit silently.
    """

    name = "ridge"

    def __init__(self, ridges: Sequence[float] = (1e-4, 1e-3, 1e-2, 1e-1), tokens_per_feature: float = 4.0):
        self.ridges = tuple(ridges)
        self.tokens_per_feature = tokens_per_feature

    def solve(self, train: Moments, held_out: Moments | None = None) -> Solution:
        needed = self.tokens_needed(train.num_features)
        if train.count < needed:
            raise CalibrationTooSmall(
                f"{train.count} tokens for {train.num_features} features; at least {needed} are needed "
                f"(more data, or fewer source layers)"
            )
        gram = train.gram()
        if held_out is None or len(self.ridges) == 1:
            return self._solved(train, gram, self.ridges[len(self.ridges) // 2])
        return max((self._solved(train, gram, ridge) for ridge in self.ridges), key=lambda s: s.r2(held_out))

    def tokens_needed(self, num_features: int) -> int:
        return round(self.tokens_per_feature * num_features)

    def _solved(self, train: Moments, gram: Tensor, ridge: float) -> Solution:
        diagonal = gram.diagonal()
        penalised = gram + torch.diag(torch.full_like(diagonal, ridge * float(diagonal.mean())))
        weight = _cholesky_solve(penalised, train.xy)
        return Solution(weight, train.mean_y - train.mean_x @ weight, ridge)


def _cholesky_solve(gram: Tensor, right: Tensor) -> Tensor:
    """gram^-1 right for a symmetric positive definite `gram`, equilibrated. Raises `RankDeficient`."""
    scale = gram.diagonal().clamp_min(0).sqrt()
    scale = torch.where(scale > 0, scale, torch.ones_like(scale)).reciprocal()
    factor, failed = torch.linalg.cholesky_ex(gram * scale[:, None] * scale)
    if int(failed) or float(factor.diagonal().square().min()) < SMALLEST_PIVOT:
        raise RankDeficient(f"{len(gram)} features depend on one another; allow a ridge above 0, or more tokens")
    return torch.cholesky_solve(right * scale[:, None], factor) * scale[:, None]
