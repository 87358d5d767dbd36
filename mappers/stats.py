"""Sufficient statistics of a linear regression, streamed: memory is bounded by the features, never by the tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from mappers.errors import GeometryMismatch

STRIP = 512  # columns of the Gram that are computed at a time; only its upper triangle is


class Moments:
    """Centred moments of features x (p,) and targets y (q,) in float64: X'X, X'Y, the diagonal of Y'Y, means, count.

    `xx` is valid in its upper triangle only; read it through `gram`.
    """

    def __init__(self, num_features: int, num_targets: int, device: str | torch.device = "cpu"):
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.float64, device=device)

        self.count = 0
        self.mean_x, self.mean_y = zeros(num_features), zeros(num_targets)
        self.xx, self.xy = zeros(num_features, num_features), zeros(num_features, num_targets)
        self.yy = zeros(num_targets)

    @property
    def num_features(self) -> int:
        return len(self.mean_x)

    @property
    def num_targets(self) -> int:
        return len(self.mean_y)

    @staticmethod
    def bytes_for(num_features: int, num_targets: int) -> int:
        """Memory that the statistics of so many features and targets take."""
        return 8 * (num_features * (num_features + num_targets + 1) + 2 * num_targets)

    def update(self, x: Tensor, y: Tensor) -> None:
        """Take in rows x (n, p) and y (n, q) of any float dtype."""
        if x.shape != (len(y), self.num_features) or y.shape[1:] != (self.num_targets,):
            need = f"(n, {self.num_features}), (n, {self.num_targets})"
            raise GeometryMismatch(f"rows {tuple(x.shape)}, {tuple(y.shape)}; need {need}")
        if len(x) == 0:
            return
        x, y = x.double(), y.double()
        mean_x, mean_y = x.mean(0), y.mean(0)
        x, y = self._with_shift(x - mean_x, mean_x - self.mean_x), self._with_shift(y - mean_y, mean_y - self.mean_y)
        for begin in range(0, self.num_features, STRIP):
            strip = slice(begin, begin + STRIP)
            self.xx[strip, begin:].addmm_(x[:, strip].T, x[:, begin:])
        self.xy.addmm_(x.T, y)
        self.yy += y.square().sum(0)
        self._shift_means(len(x) - 1, mean_x, mean_y)

    def merge(self, other: Moments) -> None:
        """Take in what another has seen; the same as having seen it here."""
        if (other.num_features, other.num_targets) != (self.num_features, self.num_targets):
            raise GeometryMismatch(
                f"moments of {other.num_features} x {other.num_targets} do not merge with "
                f"{self.num_features} x {self.num_targets}"
            )
        if other.count == 0:
            return
        weight = self.count * other.count / (self.count + other.count)
        dx, dy = other.mean_x - self.mean_x, other.mean_y - self.mean_y
        self.xx += other.xx
        self.xx.addr_(dx, dx, alpha=weight)
        self.xy += other.xy
        self.xy.addr_(dx, dy, alpha=weight)
        self.yy += other.yy + weight * dy.square()
        self._shift_means(other.count, other.mean_x, other.mean_y)

    def gram(self) -> Tensor:
        """The whole symmetric X'X, (p, p)."""
        upper = self.xx.triu()
        return upper + upper.triu(1).T

    def select(self, features: Tensor, targets: Tensor) -> Moments:
        """The moments of some features and targets, by index; features ascending."""
        part = Moments(0, 0)
        part.count = self.count
        part.mean_x, part.mean_y = self.mean_x[features], self.mean_y[targets]
        part.xx = self.xx[features[:, None], features]
        part.xy = self.xy[features[:, None], targets]
        part.yy = self.yy[targets]
        return part

    def _with_shift(self, centred: Tensor, shift: Tensor) -> Tensor:
        """One more row, whose outer product is the correction for the new rows' mean lying elsewhere."""
        weight = self.count * len(centred) / (self.count + len(centred))
        return torch.cat([centred, weight**0.5 * shift[None]])

    def _shift_means(self, count: int, mean_x: Tensor, mean_y: Tensor) -> None:
        self.count += count
        self.mean_x += (mean_x - self.mean_x) * (count / self.count)
        self.mean_y += (mean_y - self.mean_y) * (count / self.count)
