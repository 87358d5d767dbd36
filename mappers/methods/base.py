"""The interface of a mapping method: moments in, weights out. Methods know no layers, tokens, keys or values."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from mappers.cache import KVGeometry
from mappers.stats import Moments

HeadChoice = Sequence[Sequence[int]]  # for each target head the source head of every block
TINY = 1e-300  # keeps shares of a zero variance finite


@dataclass(frozen=True)
class Layout:
    """How columns group into heads.

    Features are blocks of `source_heads` heads (keys or values of one source layer), targets are layers of
    `target_heads` heads.
    """

    source_heads: int
    source_dim: int
    target_heads: int
    target_dim: int

    @classmethod
    def between(cls, source: KVGeometry, target: KVGeometry) -> Layout:
        return cls(source.num_kv_heads, source.head_dim, target.num_kv_heads, target.head_dim)

    @property
    def source_width(self) -> int:
        return self.source_heads * self.source_dim

    @property
    def target_width(self) -> int:
        return self.target_heads * self.target_dim


@dataclass(frozen=True)
class Solution:
    """The map y = x @ weight + bias in float64: weight (p, q), bias (q,). `ridge` is the penalty used, if any.

    Subclasses store the same weight in fewer numbers and apply it with fewer multiplications.
    """

    weight: Tensor
    bias: Tensor
    ridge: float | None = None
    _r2: dict[Moments, float] = field(default_factory=dict, init=False, repr=False, compare=False)

    def parts(self) -> dict[str, Tensor]:
        """Return the tensors to store, except the bias."""
        return {"weight": self.weight}

    def structure(self) -> dict[str, Any]:
        """Return the fields of `OutputSpec` that describe how the parts form the weight."""
        return {}

    def lost(self, moments: Moments) -> Tensor:
        """Return the sum of squared errors of each target, (q,), on the rows behind `moments`."""
        explained = 2 * moments.xy - moments.gram() @ self.weight  # (p, q)
        shift = moments.mean_y - self.bias - moments.mean_x @ self.weight
        return moments.yy - (self.weight * explained).sum(0) + moments.mass * shift.square()

    def r2(self, moments: Moments) -> float:
        """Return R² over all targets on other moments; below 0 if the map is worse than their mean."""
        if moments not in self._r2:
            self._r2[moments] = 1 - float(self.lost(moments).sum() / moments.yy.sum().clamp_min(TINY))
        return self._r2[moments]


@dataclass(frozen=True, kw_only=True)
class FactoredSolution(Solution):
    """A solution of low rank: weight = down @ up, with down (p, r), up (r, q)."""

    down: Tensor
    up: Tensor

    def parts(self) -> dict[str, Tensor]:
        return {"weight": self.down, "up": self.up}

    def structure(self) -> dict[str, Any]:
        return {"rank": len(self.up)}


@dataclass(frozen=True, kw_only=True)
class HeadMatchedSolution(Solution):
    """A solution that computes each target head from one source head of every block.

    `heads[t][b]` is the source head of target head t in block b. `blocks` (target heads, blocks * source_dim,
    target_dim) are the nonzero parts of the weight.
    """

    layout: Layout
    heads: tuple[tuple[int, ...], ...]
    blocks: Tensor

    @classmethod
    def of(
        cls, layout: Layout, heads: HeadChoice, blocks: Tensor, moments: Moments, ridge: float | None = None
    ) -> HeadMatchedSolution:
        """Build the solution with these blocks. Its bias follows from the means of `moments`."""
        weight = spread(layout, heads, blocks)
        return cls(
            weight=weight,
            bias=moments.mean_y - moments.mean_x @ weight,
            ridge=ridge,
            layout=layout,
            heads=tuple(map(tuple, heads)),
            blocks=blocks,
        )

    def parts(self) -> dict[str, Tensor]:
        return {"weight": self.blocks}

    def structure(self) -> dict[str, Any]:
        return {"heads": self.heads}


def head_columns(layout: Layout, heads: Sequence[int]) -> Tensor:
    """Return the feature columns of one source head of every block, (blocks * source_dim,)."""
    starts = [block * layout.source_width + head * layout.source_dim for block, head in enumerate(heads)]
    return (torch.tensor(starts)[:, None] + torch.arange(layout.source_dim)).flatten()


def spread(layout: Layout, heads: HeadChoice, blocks: Tensor) -> Tensor:
    """Return the full weight (p, q) of head-matched blocks."""
    features = len(heads[0]) * layout.source_width
    weight = blocks.new_zeros(features, len(heads) * layout.target_dim)
    for target, (chosen, block) in enumerate(zip(heads, blocks, strict=True)):
        columns = slice(target * layout.target_dim, (target + 1) * layout.target_dim)
        weight[head_columns(layout, chosen).to(weight.device), columns] = block
    return weight


class Method(ABC):
    """Computes a target layer's keys (or values) from those of some source layers.

    To add one: (1) write a subclass in a file of this folder; (2) set `name` and link the paper in the docstring;
    (3) implement `solve`, from moments to a `Solution`; (4) set `max_layers` if it takes a limited number of source
    layers; (5) override `tokens_needed` if fewer tokens overfit, and `refit` if `solve` makes choices; (6) add a line
    to the registry, which the tests run over.

    Targets are keys or values; if `predicts_hidden`, the normed hidden states that the target projects to both.
    """

    name: ClassVar[str]
    max_layers: ClassVar[int | None] = None
    predicts_hidden: ClassVar[bool] = False
    is_columnwise: ClassVar[bool] = False  # whether each target column is fitted independently

    @abstractmethod
    def solve(self, train: Moments, layout: Layout, held_out: Moments | None = None) -> Solution:
        """Fit the map from the features of `train` to its targets, choosing hyperparameters on `held_out`.

        Features are whole blocks and targets whole layers of `layout`.
        """

    def tokens_needed(self, num_features: int, layout: Layout) -> int:
        """Return the min number of tokens for `solve`."""
        return 0

    def refit(self, solution: Solution, moments: Moments, layout: Layout) -> Solution:
        """Fit the map to other moments, with the hyperparameters of `solution`."""
        return self.solve(moments, layout)

    @property
    def rough(self) -> Method:
        """A cheaper method, good enough to compare source layers by."""
        return self
