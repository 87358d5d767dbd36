"""`identity`: keys and values of the most similar source layer, unchanged."""

from __future__ import annotations

import torch

from mappers.errors import GeometryMismatch
from mappers.methods.base import Layout, Method, Solution
from mappers.stats import Moments


class Identity(Method):
    """The trivial method: exact where both models share their weights, the baseline everywhere else.

    Ignores the moments. Requires target layers as wide as the source's.
    """

    name = "identity"
    max_layers = 1

    def solve(self, train: Moments, layout: Layout, held_out: Moments | None = None) -> Solution:
        if train.num_features != layout.target_width:
            raise GeometryMismatch(
                f"identity maps {train.num_features} features to as many outputs; the target has {layout.target_width}"
            )
        eye = torch.eye(train.num_features, dtype=torch.float64, device=train.xx.device)
        return Solution(eye.repeat(1, train.num_targets // train.num_features), torch.zeros_like(train.mean_y))
