"""`ridge-head`: every target head from one matched head of each chosen source layer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from mappers.methods.base import TINY, HeadChoice, HeadMatchedSolution, Layout, Method, Solution, head_columns
from mappers.methods.ridge import RIDGES, Ridge, solve_penalised
from mappers.stats import Moments


class RidgeHead(Method):
    """Head-matched support, after CacheBridge (https://arxiv.org/abs/2609.00891).

    In every block of features each target head is matched with the source head that predicts it best alone, by
    held-out R². Ridge regression then combines the matched heads of all blocks. With H heads the map is H times
    smaller and as much cheaper to apply, and needs fewer tokens. If source and target differ in their number of heads,
    plain `ridge` is used.
    """

    name = "ridge-head"

    def __init__(self, ridges: Sequence[float] = RIDGES, tokens_per_feature: float = 4.0):
        self._full = Ridge(ridges, tokens_per_feature)

    def solve(self, train: Moments, layout: Layout, held_out: Moments | None = None) -> Solution:
        if layout.source_heads != layout.target_heads:
            return self._full.solve(train, layout, held_out)
        Ridge.check_tokens(train, self.tokens_needed(train.num_features, layout))
        heads = self._match_heads(train, layout, held_out)
        candidates = self._full.candidates(held_out)
        return Ridge.best((partial(_solve_by_head, train, layout, heads, ridge) for ridge in candidates), held_out)

    def refit(self, solution: Solution, moments: Moments, layout: Layout) -> Solution:
        heads = solution.structure().get("heads")
        if heads is None:
            return self._full.refit(solution, moments, layout)
        return _solve_by_head(moments, layout, heads, solution.ridge or 0.0)

    def tokens_needed(self, num_features: int, layout: Layout) -> int:
        is_matched = layout.source_heads == layout.target_heads
        return self._full.tokens_needed(num_features // layout.source_heads if is_matched else num_features, layout)

    @property
    def rough(self) -> Method:
        return self._full

    def _match_heads(self, train: Moments, layout: Layout, held_out: Moments | None) -> list[list[int]]:
        """Return for each target head the best source head of every block."""
        scored = held_out or train
        chosen = []
        for block in range(train.num_features // layout.source_width):
            r2 = []
            for head in range(layout.source_heads):
                columns = head_columns(layout, [head]).to(train.xx.device) + block * layout.source_width
                r2.append(self._r2_alone(train, columns, scored, layout))
            chosen.append(torch.stack(r2).argmax(0).tolist())  # of (source heads, target heads)
        return [list(heads) for heads in zip(*chosen, strict=True)]

    def _r2_alone(self, train: Moments, columns: Tensor, scored: Moments, layout: Layout) -> Tensor:
        """Return R² of every target head predicted from one source head alone."""
        everything = torch.arange(train.num_targets, device=columns.device)
        part = train.select(columns, everything)
        weight = solve_penalised(part.gram(), part.xy, self._full.candidates(None)[0], part.resolution)
        alone = Solution(weight, part.mean_y - part.mean_x @ weight)
        lost = alone.lost(scored.select(columns, everything)).view(-1, layout.target_dim).sum(1)
        return 1 - lost / scored.yy.view(-1, layout.target_dim).sum(1).clamp_min(TINY)


def _solve_by_head(train: Moments, layout: Layout, heads: HeadChoice, ridge: float) -> HeadMatchedSolution:
    blocks, gram = [], train.gram()
    for target, chosen in enumerate(heads):
        columns = head_columns(layout, chosen).to(gram.device)
        right = train.xy[columns, target * layout.target_dim : (target + 1) * layout.target_dim]
        blocks.append(solve_penalised(gram[columns[:, None], columns], right, ridge, train.resolution))
    return HeadMatchedSolution.of(layout, heads, torch.stack(blocks), train, ridge)
