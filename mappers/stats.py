"""Sufficient statistics of a linear regression, streamed: memory is bounded by the features, never by the tokens.

Rows may carry weights. Then sums are weighted sums, means weighted means, and n rows tell as much as `effective` equal
ones would.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mappers.errors import GeometryMismatch

STRIP = 512  # columns of the Gram that are computed at a time; only its upper triangle is


class Moments:
    """Centred moments of features x (p,) and targets y (q,) in float64: X'X, X'Y, the diagonal of Y'Y, means.

    `count` rows were taken in; `mass` is the sum of their weights, `squares` that of the weights' squares.

    Only the upper triangle of `xx` is kept up; read it through `gram`.
    """

    def __init__(self, num_features: int, num_targets: int, device: str | torch.device = "cpu"):
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.float64, device=device)

        self.count, self.mass, self.squares = 0, 0.0, 0.0
        self.mean_x, self.mean_y = zeros(num_features), zeros(num_targets)
        self.xx, self.xy = zeros(num_features, num_features), zeros(num_features, num_targets)
        self.yy = zeros(num_targets)
        self._whole = True

    @property
    def num_features(self) -> int:
        return len(self.mean_x)

    @property
    def num_targets(self) -> int:
        return len(self.mean_y)

    @property
    def effective(self) -> float:
        """The number of equally weighted rows that determine a mean as well (Kish)."""
        return self.mass**2 / self.squares if self.squares else 0.0

    @staticmethod
    def bytes_for(num_features: int, num_targets: int) -> int:
        """Memory that the statistics of so many features and targets take."""
        return 8 * (num_features * (num_features + num_targets + 1) + 2 * num_targets)

    def update(self, x: Tensor, y: Tensor, weights: Tensor | None = None) -> None:
        """Take in rows x (n, p) and y (n, q) of any float dtype, each as often as `weights` (n,) says, or once."""
        if x.shape != (len(y), self.num_features) or y.shape[1:] != (self.num_targets,):
            need = f"(n, {self.num_features}), (n, {self.num_targets})"
            raise GeometryMismatch(f"rows {tuple(x.shape)}, {tuple(y.shape)}; need {need}")
        if len(x) == 0:
            return
        w = torch.ones(len(x), dtype=torch.float64, device=x.device) if weights is None else weights.double()
        mass, x, y = float(w.sum()), x.double(), y.double()
        mean_x, mean_y = w @ x / mass, w @ y / mass
        x = self._with_shift(x - mean_x, w, mean_x - self.mean_x)
        y = self._with_shift(y - mean_y, w, mean_y - self.mean_y)
        self._whole = False
        for begin in range(0, self.num_features, STRIP):
            strip = slice(begin, begin + STRIP)
            self.xx[strip, begin:].addmm_(x[:, strip].T, x[:, begin:])
        self.xy.addmm_(x.T, y)
        self.yy += y.square().sum(0)
        self._shift_means(mass, mean_x, mean_y)
        self.count, self.squares = self.count + len(w), self.squares + float(w.square().sum())

    def merge(self, other: Moments) -> None:
        """Take in what another has seen; the same as having seen it here."""
        if (other.num_features, other.num_targets) != (self.num_features, self.num_targets):
            raise GeometryMismatch(
                f"moments of {other.num_features} x {other.num_targets} do not merge with "
                f"{self.num_features} x {self.num_targets}"
            )
        if other.count == 0:
            return
        weight = self.mass * other.mass / (self.mass + other.mass)
        dx, dy = other.mean_x - self.mean_x, other.mean_y - self.mean_y
        self._whole = False
        self.xx += other.xx
        self.xx.addr_(dx, dx, alpha=weight)
        self.xy += other.xy
        self.xy.addr_(dx, dy, alpha=weight)
        self.yy += other.yy + weight * dy.square()
        self._shift_means(other.mass, other.mean_x, other.mean_y)
        self.count, self.squares = self.count + other.count, self.squares + other.squares

    def changed(self) -> None:
        """To be called when `xx` was written to from outside."""
        self._whole = False

    def gram(self) -> Tensor:
        """The whole symmetric X'X, (p, p): `xx` itself, its lower triangle filled in."""
        if not self._whole:
            for begin in range(0, self.num_features, STRIP):
                end = min(begin + STRIP, self.num_features)
                upper = self.xx[begin:end, begin:end].triu()
                self.xx[begin:end, begin:end] = upper + upper.triu(1).T
                self.xx[end:, begin:end] = self.xx[begin:end, end:].T
            self._whole = True
        return self.xx

    def select(self, features: Tensor, targets: Tensor) -> Moments:
        """The moments of some features and targets, by index."""
        part = Moments(0, 0)
        part.count, part.mass, part.squares = self.count, self.mass, self.squares
        part.mean_x, part.mean_y = self.mean_x[features], self.mean_y[targets]
        part.xx, part._whole = self.gram()[features[:, None], features], True
        part.xy = self.xy[features[:, None], targets]
        part.yy = self.yy[targets]
        return part

    def _with_shift(self, centred: Tensor, weights: Tensor, shift: Tensor) -> Tensor:
        """Rows whose outer products are weighted, and one more: the correction for their mean lying elsewhere."""
        mass = float(weights.sum())
        apart = self.mass * mass / (self.mass + mass)
        return torch.cat([weights.sqrt()[:, None] * centred, apart**0.5 * shift[None]])

    def _shift_means(self, mass: float, mean_x: Tensor, mean_y: Tensor) -> None:
        self.mass += mass
        self.mean_x += (mean_x - self.mean_x) * (mass / self.mass)
        self.mean_y += (mean_y - self.mean_y) * (mass / self.mass)
