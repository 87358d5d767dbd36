"""Rows of a regression that come in one after another, and the moments of any of their columns.

    rows ──► batch ──► batch ──► ...                as they are, while they are few
                │
              fold ──► moments                      from then on every batch that is full is added, and let go

Moments cost memory and multiplications that grow with the square of the columns, however few the rows. As long as there
are only the rows, the moments of some columns are computed from these columns alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from mappers.stats import Moments, Rows, check_rows, product_dtype

BATCH = 2048  # rows that are multiplied at once


class Batch:
    """Up to BATCH rows x (n, p), y (n, q) with weights (n,), as they came in."""

    def __init__(self, num_features: int, num_targets: int, dtype: torch.dtype, device: str | torch.device):
        self._x = torch.empty(BATCH, num_features, dtype=dtype, device=device)
        self._y = torch.empty(BATCH, num_targets, dtype=dtype, device=device)
        self._weights = torch.empty(BATCH, dtype=torch.float64, device=device)
        self.dtype, self.count = dtype, 0

    @property
    def room(self) -> int:
        return BATCH - self.count

    @property
    def mass(self) -> float:
        return float(self.parts[2].sum())

    @property
    def squares(self) -> float:
        return float(self.parts[2].square().sum())

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """x, y and the weights so far."""
        return self._x[: self.count], self._y[: self.count], self._weights[: self.count]

    def take(self, x: Tensor, y: Tensor, weights: Tensor) -> int:
        """Take in the first of these rows, as many as there is room for; their number."""
        begin, self.count = self.count, min(BATCH, self.count + len(x))
        for mine, new in zip(self.parts, (x, y, weights), strict=True):
            mine[begin:] = new[: self.count - begin]
        return self.count - begin


class Gathered:
    """Rows x (p,), y (q,) of any float dtype, `fold`ed to moments when they grow too many.

    While `moments` are None, `batches` hold all rows as they came; the first `select` takes their means off.
    """

    def __init__(self, num_features: int, num_targets: int, device: str | torch.device = "cpu"):
        self.num_features, self.num_targets, self._device = num_features, num_targets, device
        self.moments: Moments | None = None
        self.batches: list[Batch] = []
        self._rows: list[Rows] = []

    @staticmethod
    def bytes_for(num_features: int, num_targets: int) -> int:
        """Memory that one row of float32 takes."""
        return 4 * (num_features + num_targets) + 8

    @property
    def count(self) -> int:
        return sum(part.count for part in self._all)

    @property
    def effective(self) -> float:
        """The number of equally weighted rows that determine a mean as well (Kish)."""
        squares = sum(part.squares for part in self._all)
        return sum(part.mass for part in self._all) ** 2 / squares if squares else 0.0

    def update(self, x: Tensor, y: Tensor, weights: Tensor | None = None) -> None:
        """Take in rows x (n, p) and y (n, q), each as often as `weights` (n,) says, or once."""
        check_rows(x, y, self.num_features, self.num_targets)
        weights = torch.ones(len(x), dtype=torch.float64, device=x.device) if weights is None else weights
        while len(x):
            batch = self._open(product_dtype(x, y))
            num_taken = batch.take(x, y, weights)
            x, y, weights = x[num_taken:], y[num_taken:], weights[num_taken:]
            if self.moments is not None and not batch.room:
                self.fold()

    def fold(self) -> Moments:
        """The moments of all rows, which are let go."""
        if self.moments is None:
            self.moments = Moments(self.num_features, self.num_targets, self._device)
        while self._rows or self.batches:
            self.moments.add(self._rows.pop(0) if self._rows else _centred(self.batches.pop(0)))
        return self.moments

    def select(
        self, features: Tensor, targets: Tensor, enough: float = math.inf, like: Moments | None = None
    ) -> Moments:
        """The moments of some features and targets, by index; for `like` see `Moments`.

        Of rows no more are looked at than tell as much as `enough` equal ones.
        """
        if self.moments is not None:
            return self.fold().select(features, targets, like)
        while self.batches:
            self._rows.append(_centred(self.batches.pop(0)))
        part = Moments(len(features), len(targets), self._device, like)
        for rows in self._rows:
            if part.effective < enough:
                part.add(rows.select(features, targets))
        return part

    @property
    def _all(self) -> Sequence[Moments | Batch | Rows]:
        return [*([self.moments] if self.moments else []), *self._rows, *self.batches]

    def _open(self, dtype: torch.dtype) -> Batch:
        """The batch that takes the next rows."""
        if not self.batches or not self.batches[-1].room or self.batches[-1].dtype != dtype:
            self.batches.append(Batch(self.num_features, self.num_targets, dtype, self._device))
        return self.batches[-1]


def _centred(batch: Batch) -> Rows:
    return Rows.centred(*batch.parts)
