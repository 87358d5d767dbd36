"""Greedy forward selection of source blocks, by linear algebra on the statistics alone.

Beside the selected columns S, a candidate block c brings only what S can't tell, its residual Z_c:

    Z_c = X_c - X_S W_c,    W_c = P_SS^-1 G_Sc                (G the training Gram, P with its penalty)
    B_c = (P_cc - G_cS W_c)^-1 (X_c'Y - W_c' X_S'Y)           what it adds to the map, fitted on training moments
    gain = 2 <Z_c'E, B_c> - <B_c, Z_c'Z_c B_c>                what that takes off the held-out error E

so one solve for all candidates at once does for each step, in place of one fit a candidate.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mappers.collect import Group
from mappers.manifest import Block
from mappers.methods.ridge import cholesky_solve

RIDGE = 1e-3  # relative to each block's own scale; for the comparison only
POOL = 3  # candidates for each block that may be taken: those that explain most alone


def forward_path(group: Group, index: int, r2_alone: Tensor, most: int) -> list[tuple[Block, ...]]:
    """Sets of 1, 2, ..., `most` blocks for one target, each with the one before it inside; blocks ascending.

    `r2_alone` (blocks,) tells how much each explains alone; the first is the best of them.
    """
    pool = r2_alone.argsort(stable=True, descending=True)[: POOL * most].tolist()
    selection = _Selection(group, index, [group.blocks[i] for i in pool])
    taken = [0]
    while len(taken) < min(most, len(pool)):
        gains = selection.gains(taken)
        taken.append(max(gains, key=gains.__getitem__))
    blocks = [group.blocks[pool[i]] for i in taken]
    return [tuple(sorted(blocks[:k])) for k in range(1, len(blocks) + 1)]


class _Selection:
    """The moments of one target and its candidates, in candidates' order."""

    def __init__(self, group: Group, index: int, candidates: list[Block]):
        features, targets = group.features(candidates), group.outputs(index)
        train, held_out = group.train.select(features, targets), group.held_out.select(features, targets)
        self._gram, self._cross = train.gram(), train.xy
        self._held_gram, self._held_cross = held_out.gram(), held_out.xy
        self._num, self._width = len(candidates), len(features) // len(candidates)
        self._resolution = train.resolution
        diagonal = self._gram.diagonal().view(self._num, -1)
        self._penalty = (RIDGE * diagonal.mean(1, keepdim=True)).expand_as(diagonal).flatten()

    def gains(self, taken: list[int]) -> dict[int, float]:
        """How much each candidate not yet taken takes off the held-out squared error, beside those that are."""
        s = torch.cat([torch.arange(i * self._width, (i + 1) * self._width) for i in taken]).to(self._gram.device)
        g, h = self._gram[s], self._held_gram[s]  # (s, p)
        inner = g[:, s] + torch.diag(self._penalty[s])
        solved = cholesky_solve(inner, torch.cat([g, self._cross[s]], dim=1), self._resolution)
        w, b = solved[:, : len(self._gram)], solved[:, len(self._gram) :]  # (s, p), (s, q)
        left = self._held_cross[s] - h[:, s] @ b  # X_S'E
        curved = h - h[:, s] @ w  # X_S'Z
        others = [i for i in range(self._num) if i not in taken]
        return {i: self._gain(i, g, h, w, b, left, curved) for i in others}

    def _gain(self, i: int, g: Tensor, h: Tensor, w: Tensor, b: Tensor, left: Tensor, curved: Tensor) -> float:
        c = slice(i * self._width, (i + 1) * self._width)
        inner = self._gram[c, c] + torch.diag(self._penalty[c]) - g[:, c].T @ w[:, c]
        added = cholesky_solve(inner, self._cross[c] - g[:, c].T @ b, self._resolution)  # W_c' X_S'Y = G_cS B_S
        explained = self._held_cross[c] - h[:, c].T @ b - w[:, c].T @ left  # Z_c'E
        power = self._held_gram[c, c] - h[:, c].T @ w[:, c] - w[:, c].T @ curved[:, c]  # Z_c'Z_c
        return float((added * (2 * explained - power @ added)).sum())
