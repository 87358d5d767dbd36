"""`procrustes`: the rotation that brings one source layer closest to the target's."""

from __future__ import annotations

import torch
from torch import Tensor

from mappers.errors import GeometryMismatch
from mappers.methods.base import HeadMatchedSolution, Layout, Method, Solution, head_columns
from mappers.stats import Moments


class Procrustes(Method):
    """Orthogonal Procrustes: the rotation of the centred features that is nearest to the targets.

    Schönemann 1966, https://doi.org/10.1007/BF02289451:

        X'Y = U S V',    weight = U V',    bias = mean(y) - mean(x) weight

    If source and target differ in heads but not in head size, every target head is rotated from the source head with
    the largest sum of S.
    """

    name = "procrustes"
    max_layers = 1

    def solve(self, train: Moments, layout: Layout, held_out: Moments | None = None) -> Solution:
        if train.num_features != layout.source_width:
            raise GeometryMismatch(
                f"procrustes on {train.num_features} features; allowed: one block of {layout.source_width}"
            )
        if layout.source_width == layout.target_width:
            layers = train.xy.tensor_split(train.num_targets // layout.target_width, dim=1)
            weight = torch.cat([_rotation(xy)[0] for xy in layers], dim=1)
            return Solution(weight, train.mean_y - train.mean_x @ weight)
        if layout.source_dim != layout.target_dim:
            raise GeometryMismatch(
                f"procrustes rotates layers of equal width or heads of equal size; the source has "
                f"{layout.source_heads} x {layout.source_dim}, the target {layout.target_heads} x {layout.target_dim}"
            )
        return _by_head(train, layout)


def _by_head(train: Moments, layout: Layout) -> HeadMatchedSolution:
    heads, blocks = [], []
    for xy in train.xy.tensor_split(train.num_targets // layout.target_dim, dim=1):
        rotations = [_rotation(xy[head_columns(layout, [head])]) for head in range(layout.source_heads)]
        best = max(range(layout.source_heads), key=lambda head: rotations[head][1])
        heads.append([best])
        blocks.append(rotations[best][0])
    return HeadMatchedSolution.of(layout, heads, torch.stack(blocks), train)


def _rotation(xy: Tensor) -> tuple[Tensor, float]:
    """Return the rotation nearest to a cross-moment (p, p), and the sum of its singular values."""
    left, singular, right = torch.linalg.svd(xy)
    return left @ right, float(singular.sum())
