"""`ridge`: least squares with a penalty relative to the scale of the features."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from mappers.errors import CalibrationTooSmall, MapperError, RankDeficient
from mappers.methods.base import Layout, Method, Solution
from mappers.stats import Moments

RIDGES = (1e-4, 1e-3, 1e-2, 1e-1)


class Ridge(Method):
    """Ridge regression in closed form, after https://arxiv.org/abs/2608.03893.

    Top-k source layers, RoPE stripped, bias by centring:

        weight = (X'X + ridge * mean(diag X'X) * I)^-1 X'Y,    bias = mean(y) - mean(x) weight

    Solved by Cholesky in float64 after scaling the Gram matrix to a unit diagonal. The penalty is relative: the
    meaning of an absolute one would depend on the number of tokens. Penalties are tried from the smallest on, until
    one is worse on held-out moments than the one before. Without held-out moments the middle one is used. A penalty
    too small for dependent features is skipped, unless all are. Fewer than `tokens_per_feature` tokens per feature are
    refused, since they overfit silently.
    """

    name = "ridge"
    is_columnwise = True

    def __init__(self, ridges: Sequence[float] = RIDGES, tokens_per_feature: float = 4.0):
        if not ridges or min(ridges) < 0:
            raise MapperError(f"ridges are {tuple(ridges)}; allowed: at least one, each 0 or more")
        self.ridges = tuple(sorted(ridges))
        self.tokens_per_feature = tokens_per_feature

    def solve(self, train: Moments, layout: Layout, held_out: Moments | None = None) -> Solution:
        self.check_tokens(train, self.tokens_needed(train.num_features, layout))
        return self.best((partial(_solve, train, ridge) for ridge in self.candidates(held_out)), held_out)

    def refit(self, solution: Solution, moments: Moments, layout: Layout) -> Solution:
        return _solve(moments, solution.ridge or 0.0)

    def tokens_needed(self, num_features: int, layout: Layout) -> int:
        return round(self.tokens_per_feature * num_features)

    @staticmethod
    def check_tokens(train: Moments, needed: int) -> None:
        """Raise `CalibrationTooSmall` for fewer effective tokens than `needed`."""
        if train.effective < needed * (1 - 1e-9):
            raise CalibrationTooSmall(
                f"{train.effective:.0f} tokens for {train.num_features} features; at least {needed} are needed "
                f"(use more data or fewer source layers)"
            )

    def candidates(self, held_out: Moments | None) -> tuple[float, ...]:
        """Return the penalties to try: all of them with held-out moments, else the middle one."""
        return self.ridges if held_out is not None else (self.ridges[len(self.ridges) // 2],)

    @staticmethod
    def best(attempts: Iterable[Callable[[], Solution]], held_out: Moments | None) -> Solution:
        """Run attempts of increasing penalty until one is worse on held-out moments; return the one before it.

        Without held-out moments the first is returned. Attempts that raise `RankDeficient` are skipped, unless all do.
        """
        best: tuple[float, Solution] | None = None
        failed: RankDeficient | None = None
        for attempt in attempts:
            try:
                solution = attempt()
            except RankDeficient as error:
                failed = error
                continue
            r2 = solution.r2(held_out) if held_out else 0.0
            if best and r2 <= best[0]:
                break
            best = r2, solution
        if best:
            return best[1]
        assert failed  # there is at least one penalty
        raise failed


def _solve(train: Moments, ridge: float) -> Solution:
    factor = train.of_features(ridge, lambda: factorise(penalised(train.gram(), ridge), train.resolution))
    weight = factor.solve(train.xy)
    return Solution(weight, train.mean_y - train.mean_x @ weight, ridge)


def solve_penalised(gram: Tensor, right: Tensor, ridge: float, resolution: float) -> Tensor:
    """Return (gram + ridge * mean(diag gram) * I)^-1 right. Raises `RankDeficient`."""
    return cholesky_solve(penalised(gram, ridge), right, resolution)


def penalised(gram: Tensor, ridge: float) -> Tensor:
    """Return gram + ridge * mean(diag gram) * I."""
    raised = gram.clone()
    raised.diagonal().add_(ridge * float(gram.diagonal().mean()))
    return raised


@dataclass(frozen=True)
class CholeskyFactor:
    """Factor of a symmetric positive definite matrix: `lower` (p, p) is that of the matrix scaled by `scale` (p,)."""

    lower: Tensor
    scale: Tensor

    def solve(self, right: Tensor) -> Tensor:
        """Return the inverse of the matrix times `right` (p, q)."""
        return torch.cholesky_solve(right * self.scale[:, None], self.lower) * self.scale[:, None]


def factorise(gram: Tensor, resolution: float) -> CholeskyFactor:
    """Factorise a Gram matrix.

    Raises `RankDeficient` if other features explain all but the share `resolution` of one feature's variance.
    """
    scale = gram.diagonal().clamp_min(0).sqrt()
    scale = torch.where(scale > 0, scale, torch.ones_like(scale)).reciprocal()
    lower, failed = torch.linalg.cholesky_ex(gram * scale[:, None] * scale)
    if int(failed) or float(lower.diagonal().square().min()) < resolution:
        raise RankDeficient(f"{len(gram)} features are linearly dependent; allow a ridge above 0, or use more tokens")
    return CholeskyFactor(lower, scale)


def cholesky_solve(gram: Tensor, right: Tensor, resolution: float) -> Tensor:
    """Return gram^-1 right. Raises `RankDeficient`, see `factorise`."""
    return factorise(gram, resolution).solve(right)
