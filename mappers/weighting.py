"""How much each calibration token counts: all alike, or as the target attends to it.

A token that is attended to much does more harm when its key or value is mapped badly (`field.md` calls it the fourth
best of what is known to help). Weights are shrunk towards all alike, so that few tokens do not drown the others.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from mappers.attention import Attending
from mappers.errors import MapperError

Weighting = Literal["uniform", "attention"]
EFFECTIVE_SHARE = 0.5


class Received:
    """Listens to a model that reads one document; sums up the attention that each token gets from those behind it.

    A query's attention counts in multiples of what it would pay if it paid all that it sees the same; so a token's
    share does not depend on where it stands.
    """

    def __init__(self, num_tokens: int, device: torch.device | str = "cpu"):
        self._paid = torch.zeros(num_tokens, dtype=torch.float64, device=device)
        self._queries = torch.zeros_like(self._paid)

    def __call__(self, attending: Attending) -> None:
        num_new, num_all = attending.visible.shape
        own = torch.ones_like(attending.visible).tril(num_all - num_new).triu(num_all - num_new)
        others = attending.visible & ~own
        seen = attending.visible.sum(1, keepdim=True)
        paid = attending.weights().mean(0) * seen * others  # (new, all)
        self._paid[:num_all] += paid.sum(0)
        self._queries[:num_all] += others.sum(0)

    def mean(self) -> Tensor:
        """(T,): attention received a query, 1 where all tokens get the same; 1 for a token that nobody looks at."""
        heard = self._queries > 0
        return torch.where(heard, self._paid / self._queries.clamp_min(1), torch.ones_like(self._paid))


def shrunk(weights: Tensor, effective_share: float) -> Tensor:
    """Weights (n,) of mean 1, moved as little towards 1 as makes n of them tell as much as `effective_share * n`.

    With v the variance of weights of mean 1, the share is 1 / (1 + v).
    """
    scaled = weights / weights.mean()
    spread = float((scaled - 1).square().mean().sqrt())
    allowed = (1 / effective_share - 1) ** 0.5
    return scaled if spread <= allowed else 1 + (scaled - 1) * (allowed / spread)


def check_weighting(weighting: str, effective_share: float) -> None:
    """Raise `MapperError` for what is no weighting, or no share."""
    if weighting not in get_args(Weighting):
        raise MapperError(f"unknown weighting {weighting!r}; known: {', '.join(get_args(Weighting))}")
    if not 0 < effective_share <= 1:
        raise MapperError(f"effective_share is {effective_share}; allowed: above 0, up to 1")
