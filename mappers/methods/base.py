"""What a mapping method is: moments in, weights out. It knows no layer, no head, no key and no value."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from mappers.stats import Moments

TINY = 1e-300  # keeps the share of no variance at all finite


@dataclass(frozen=True)
class Solution:
    """y = x @ weight + bias, float64; weight (p, q), bias (q,). `ridge` is the penalty that was used, if any."""

    weight: Tensor
    bias: Tensor
    ridge: float | None = None

    def lost(self, moments: Moments) -> Tensor:
        """Sum of squared errors of each target, (q,), over what other moments have seen."""
        explained = 2 * moments.xy - moments.gram() @ self.weight  # (p, q)
        shift = moments.mean_y - self.bias - moments.mean_x @ self.weight
        return moments.yy - (self.weight * explained).sum(0) + moments.count * shift.square()

    def r2(self, moments: Moments) -> float:
        """Share of the targets' variance that this map explains on other moments; below 0 if worse than their mean."""
        return 1 - float(self.lost(moments).sum() / moments.yy.sum().clamp_min(TINY))


class Method(ABC):
    """One way to compute a target layer's keys (or values) from those of some source layers.

    How to add one: (1) a file in this folder with a subclass; (2) its `name`, and the paper in its docstring;
    (3) `solve`, from moments to a `Solution`; (4) `max_layers` if it takes only so many source layers; (5)
    `tokens_needed`, if fewer would overfit; (6) a line in the registry, over which the tests run.
    """

    name: ClassVar[str]
    max_layers: ClassVar[int | None] = None

    @abstractmethod
    def solve(self, train: Moments, held_out: Moments | None = None) -> Solution:
        """The map from the features of `train` to its targets; settings may be chosen on `held_out`."""

    def tokens_needed(self, num_features: int) -> int:
        """How many tokens `solve` asks for, at least."""
        return 0
