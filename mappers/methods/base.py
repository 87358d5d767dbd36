"""What a mapping method is: moments in, weights out. It knows no layer, no token, no key and no value."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from mappers.stats import Moments

Heads = Sequence[Sequence[int]]  # for each target head the source head of every block
TINY = 1e-300  # keeps the share of no variance at all finite


@dataclass(frozen=True)
class Layout:
    """How columns group into heads.

    Features are blocks of `source_heads` heads (a source layer's keys, or its values), targets layers of
    `target_heads` heads.
    """

    source_heads: int
    source_dim: int
    target_heads: int
    target_dim: int

    @property
    def source_width(self) -> int:
        return self.source_heads * self.source_dim

    @property
    def target_width(self) -> int:
        return self.target_heads * self.target_dim


@dataclass(frozen=True)
class Solution:
    """y = x @ weight + bias, float64; weight (p, q), bias (q,). `ridge` is the penalty that was used, if any.

    A subclass stores the same weight in fewer numbers, and is applied in fewer multiplications.
    """

    weight: Tensor
    bias: Tensor
    ridge: float | None = None
    _judged: dict[Moments, float] = field(default_factory=dict, init=False, repr=False, compare=False)

    def parts(self) -> dict[str, Tensor]:
        """The tensors that are stored, bias aside."""
        return {"weight": self.weight}

    def structure(self) -> dict[str, Any]:
        """The fields of `OutputSpec` that tell how the parts make up the weight."""
        return {}

    def lost(self, moments: Moments) -> Tensor:
        """Sum of squared errors of each target, (q,), over what other moments have seen."""
        explained = 2 * moments.xy - moments.gram() @ self.weight  # (p, q)
        shift = moments.mean_y - self.bias - moments.mean_x @ self.weight
        return moments.yy - (self.weight * explained).sum(0) + moments.mass * shift.square()

    def r2(self, moments: Moments) -> float:
        """Share of the targets' variance that this map explains on other moments; below 0 if worse than their mean."""
        if moments not in self._judged:
            self._judged[moments] = 1 - float(self.lost(moments).sum() / moments.yy.sum().clamp_min(TINY))
        return self._judged[moments]


@dataclass(frozen=True, kw_only=True)
class FactoredSolution(Solution):
    """weight = down @ up; down (p, r), up (r, q)."""

    down: Tensor
    up: Tensor

    def parts(self) -> dict[str, Tensor]:
        return {"weight": self.down, "up": self.up}

    def structure(self) -> dict[str, Any]:
        return {"rank": len(self.up)}


@dataclass(frozen=True, kw_only=True)
class HeadMatchedSolution(Solution):
    """Each target head from one source head of every block: `heads[t][b]` for target head t, block b.

    `blocks` (target heads, blocks * source_dim, target_dim) are what is not zero of the weight.
    """

    layout: Layout
    heads: tuple[tuple[int, ...], ...]
    blocks: Tensor

    @classmethod
    def of(
        cls, layout: Layout, heads: Heads, blocks: Tensor, moments: Moments, ridge: float | None = None
    ) -> HeadMatchedSolution:
        """The solution with these blocks, its bias from the means of `moments`."""
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
    """The feature columns of one source head of every block, (blocks * source_dim,)."""
    starts = [block * layout.source_width + head * layout.source_dim for block, head in enumerate(heads)]
    return (torch.tensor(starts)[:, None] + torch.arange(layout.source_dim)).flatten()


def spread(layout: Layout, heads: Heads, blocks: Tensor) -> Tensor:
    """The whole weight (p, q) that head blocks stand for."""
    features = len(heads[0]) * layout.source_width
    weight = blocks.new_zeros(features, len(heads) * layout.target_dim)
    for target, (chosen, block) in enumerate(zip(heads, blocks, strict=True)):
        columns = slice(target * layout.target_dim, (target + 1) * layout.target_dim)
        weight[head_columns(layout, chosen).to(weight.device), columns] = block
    return weight


class Method(ABC):
    """One way to compute a target layer's keys (or values) from those of some source layers.

    How to add one: (1) a file in this folder with a subclass; (2) its `name`, and the paper in its docstring;
    (3) `solve`, from moments to a `Solution`; (4) `max_layers` if it takes only so many source layers; (5)
    `tokens_needed`, if fewer would overfit, and `refit`, if `solve` chooses; (6) a line in the registry, over which the
    tests run.

    Targets are keys or values; or if `predicts_hidden`, the normed hidden states that the target makes both from.
    """

    name: ClassVar[str]
    max_layers: ClassVar[int | None] = None
    predicts_hidden: ClassVar[bool] = False
    is_columnwise: ClassVar[bool] = False  # each column of a target is fitted by itself

    @abstractmethod
    def solve(self, train: Moments, layout: Layout, held_out: Moments | None = None) -> Solution:
        """The map from the features of `train` to its targets; settings may be chosen on `held_out`.

        Features are whole blocks and targets whole layers of `layout`.
        """

    def tokens_needed(self, num_features: int, layout: Layout) -> int:
        """How many tokens `solve` asks for, at least."""
        return 0

    def refit(self, solution: Solution, moments: Moments, layout: Layout) -> Solution:
        """The map again from other moments, with everything that was chosen for `solution` as it is."""
        return self.solve(moments, layout)

    @property
    def rough(self) -> Method:
        """A cheap stand-in, good enough to compare source layers by."""
        return self
