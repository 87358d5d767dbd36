"""Sufficient statistics of a linear regression, streamed: memory is bounded by the features, not by the tokens.

    rows ──► batch ──► batch ──► ...     raw, while they take less memory than moments
                │
              fold ──► moments           from then on every full batch is added and freed

Moments take memory and multiplications quadratic in the columns, however few the rows. While there are only raw rows,
moments of some columns are computed from those columns alone.

Rows may carry weights. Sums are then weighted sums, means weighted means, and n rows count as `effective` equal ones.

Rows are centred, then multiplied in their own precision batch by batch; sums over batches are float64. Products of
float32 rows are accurate to about 1e-7 of the features' variance. This is far below the penalties of a fit, but above
float64 rounding: see `resolution`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from mappers.errors import GeometryMismatch

T = TypeVar("T")

BATCH = 2048  # rows multiplied at once
STRIP = 256  # columns of the Gram matrix computed at a time; only its upper triangle is
WIDE_STRIP = 2048  # the same for products with targets
MAX_SHARED = 2048  # features; results for more take too much memory to be kept
MAX_KEPT = 5 * 2**23  # sum of squared feature counts of all results that are kept
MAX_RUNS = 64  # runs of adjacent columns taken as slices; beyond, columns are indexed one by one
RESOLUTION = {torch.float32: 1e-6, torch.float64: 1e-14}  # by dtype of the products


@dataclass(frozen=True)
class Rows:
    """Rows x (n, p) and y (n, q), centred and multiplied by the square root of their weights.

    `mean_x` (p,) and `mean_y` (q,) were subtracted. `yy` (q,) is the sum of squares of y. `mass` is the sum of the
    weights, `squares` that of their squares. All of these are float64.
    """

    x: Tensor
    y: Tensor
    mean_x: Tensor
    mean_y: Tensor
    yy: Tensor
    mass: float
    squares: float

    @classmethod
    def centred(cls, x: Tensor, y: Tensor, weights: Tensor) -> Rows:
        """Centre raw rows (n, ...), n > 0, in place. `weights` (n,) are float64."""
        mean_x, mean_y = _centre(x, weights), _centre(y, weights)
        yy = y.square().sum(0).double()
        return cls(x, y, mean_x, mean_y, yy, float(weights.sum()), float(weights.square().sum()))

    @property
    def count(self) -> int:
        return len(self.x)

    def select(self, features: Tensor, targets: Tensor) -> Rows:
        """Return some columns, by index."""
        part = replace(self, x=take_columns(self.x, features), mean_x=self.mean_x[features])
        return replace(part, y=take_columns(self.y, targets), mean_y=self.mean_y[targets], yy=self.yy[targets])


class Moments:
    """Centred moments of features x (p,) and targets y (q,) in float64: X'X, X'Y, the diagonal of Y'Y, means.

    `count` is the number of rows, `mass` the sum of their weights, `squares` the sum of the squared weights.
    `resolution` is the share of a feature's variance below which nothing can be distinguished from rounding.

    Only the upper triangle of `xx` is kept up to date; access it through `gram`. Moments created `like` others have the
    same rows and features: everything that depends on the features alone is shared and computed once.
    """

    def __init__(
        self,
        num_features: int,
        num_targets: int,
        device: str | torch.device = "cpu",
        like: Moments | None = None,
    ):
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.float64, device=device)

        self.count, self.mass, self.squares = 0, 0.0, 0.0
        self.resolution = RESOLUTION[torch.float64]
        self.mean_x, self.mean_y = zeros(num_features), zeros(num_targets)
        self.xy, self.yy = zeros(num_features, num_targets), zeros(num_targets)
        self._is_like, self._is_symmetric = like is not None, True
        self.xx = zeros(num_features, num_features) if like is None else like.gram()
        self._of_features: dict[Any, Any] = {} if like is None else like._of_features

    @property
    def num_features(self) -> int:
        return len(self.mean_x)

    @property
    def num_targets(self) -> int:
        return len(self.mean_y)

    @property
    def effective(self) -> float:
        """Effective sample size: the number of equally weighted rows that determine a mean as well (Kish)."""
        return self.mass**2 / self.squares if self.squares else 0.0

    @staticmethod
    def bytes_for(num_features: int, num_targets: int) -> int:
        return 8 * (num_features * (num_features + num_targets + 1) + 2 * num_targets)

    def update(self, x: Tensor, y: Tensor, weights: Tensor | None = None) -> None:
        """Add rows x (n, p) and y (n, q) of any float dtype, with `weights` (n,) or weight 1."""
        check_rows(x, y, self.num_features, self.num_targets)
        if len(x):
            dtype = product_dtype(x, y)
            w = torch.ones(len(x), device=x.device) if weights is None else weights
            self.add(Rows.centred(x.to(dtype, copy=True), y.to(dtype, copy=True), w.double()))

    def add(self, rows: Rows) -> None:
        apart = self.mass * rows.mass / (self.mass + rows.mass)
        dx, dy = rows.mean_x - self.mean_x, rows.mean_y - self.mean_y
        for strip in _strips(self.num_features, WIDE_STRIP):
            self.xy[strip] += rows.x[:, strip].T @ rows.y
        self.xy.addr_(dx, dy, alpha=apart)
        if not self._is_like:
            for strip in _strips(self.num_features, STRIP):
                right = slice(strip.start, None)
                self.xx[strip, right] += rows.x[:, strip].T @ rows.x[:, right]
                self.xx[strip, right].addr_(dx[strip], dx[right], alpha=apart)
            self._is_symmetric = False
        self.yy += rows.yy + apart * dy.square()
        self.resolution = max(self.resolution, RESOLUTION[rows.x.dtype])
        self._shift_means(rows)

    def merge(self, other: Moments) -> None:
        """Add the rows behind other moments. Raises `GeometryMismatch` for other numbers of columns."""
        if (other.num_features, other.num_targets) != (self.num_features, self.num_targets):
            raise GeometryMismatch(
                f"moments of {other.num_features} x {other.num_targets} do not merge with "
                f"{self.num_features} x {self.num_targets}"
            )
        if other.count == 0:
            return
        apart = self.mass * other.mass / (self.mass + other.mass)
        dx, dy = other.mean_x - self.mean_x, other.mean_y - self.mean_y
        if not self._is_like:
            self._is_symmetric = False
            self.xx += other.xx
            self.xx.addr_(dx, dx, alpha=apart)
        self.xy += other.xy
        self.xy.addr_(dx, dy, alpha=apart)
        self.yy += other.yy + apart * dy.square()
        self.resolution = max(self.resolution, other.resolution)
        self._shift_means(other)

    def changed(self) -> None:
        """Call after writing to `xx` from outside."""
        self._is_symmetric = False

    def gram(self) -> Tensor:
        """Return the symmetric X'X (p, p): `xx` itself with its lower triangle filled in."""
        if not self._is_symmetric:
            for begin in range(0, self.num_features, STRIP):
                end = min(begin + STRIP, self.num_features)
                upper = self.xx[begin:end, begin:end].triu()
                self.xx[begin:end, begin:end] = upper + upper.triu(1).T
                self.xx[end:, begin:end] = self.xx[begin:end, end:].T
            self._is_symmetric = True
        return self.xx

    def of_features(self, key: Hashable, make: Callable[[], T]) -> T:
        """Cache a result that depends on the features alone, also for moments `like` these.

        Up to MAX_SHARED features. The features must not change afterwards.
        """
        if self.num_features > MAX_SHARED:
            return make()
        if key not in self._of_features:
            self._of_features[key] = make()
        result: T = self._of_features[key]
        return result

    def select(self, features: Tensor, targets: Tensor, like: Moments | None = None) -> Moments:
        """Return the moments of some features and targets, by index."""
        part = Moments(0, 0, like=like)
        part.count, part.mass, part.squares = self.count, self.mass, self.squares
        part.resolution = self.resolution
        part.mean_x, part.mean_y = self.mean_x[features], self.mean_y[targets]
        if like is None:
            part.xx = self.gram()[features[:, None], features]
        part.xy = self.xy[features[:, None], targets]
        part.yy = self.yy[targets]
        return part

    def _shift_means(self, other: Moments | Rows) -> None:
        self.count += other.count
        self.squares += other.squares
        self.mass += other.mass
        self.mean_x += (other.mean_x - self.mean_x) * (other.mass / self.mass)
        self.mean_y += (other.mean_y - self.mean_y) * (other.mass / self.mass)


class Batch:
    """Buffer of up to BATCH raw rows x (n, p), y (n, q) with weights (n,)."""

    def __init__(self, num_features: int, num_targets: int, dtype: torch.dtype, device: str | torch.device):
        self._x = torch.empty(BATCH, num_features, dtype=dtype, device=device)
        self._y = torch.empty(BATCH, num_targets, dtype=dtype, device=device)
        self._weights = torch.empty(BATCH, dtype=torch.float64, device=device)
        self.dtype, self.count = dtype, 0

    @property
    def is_full(self) -> bool:
        return self.count == BATCH

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

    def add(self, x: Tensor, y: Tensor, weights: Tensor) -> int:
        """Append the first of these rows, as many as fit, and return their number."""
        begin, self.count = self.count, min(BATCH, self.count + len(x))
        for buffer, new in zip(self.parts, (x, y, weights), strict=True):
            buffer[begin:] = new[: self.count - begin]
        return self.count - begin


class RowAccumulator:
    """Accumulates rows x (p,), y (q,) of any float dtype, raw at first, as moments after `fold`.

    While `moments` is None, `batches` hold all rows raw; the first `select` centres them.
    """

    def __init__(self, num_features: int, num_targets: int, device: str | torch.device = "cpu"):
        self.num_features, self.num_targets, self._device = num_features, num_targets, device
        self.moments: Moments | None = None
        self.batches: list[Batch] = []
        self._rows: list[Rows] = []

    @staticmethod
    def bytes_for(num_features: int, num_targets: int) -> int:
        """Memory of one float32 row."""
        return 4 * (num_features + num_targets) + 8

    @property
    def count(self) -> int:
        return sum(part.count for part in self._all)

    @property
    def effective(self) -> float:
        """Effective sample size, as `Moments.effective`."""
        squares = sum(part.squares for part in self._all)
        return sum(part.mass for part in self._all) ** 2 / squares if squares else 0.0

    def update(self, x: Tensor, y: Tensor, weights: Tensor | None = None) -> None:
        """Add rows x (n, p) and y (n, q), with `weights` (n,) or weight 1."""
        check_rows(x, y, self.num_features, self.num_targets)
        weights = torch.ones(len(x), dtype=torch.float64, device=x.device) if weights is None else weights
        while len(x):
            batch = self._open_batch(product_dtype(x, y))
            num_added = batch.add(x, y, weights)
            x, y, weights = x[num_added:], y[num_added:], weights[num_added:]
            if self.moments is not None and batch.is_full:
                self.fold()

    def fold(self) -> Moments:
        """Fold all rows into the moments, free them, and return the moments."""
        if self.moments is None:
            self.moments = Moments(self.num_features, self.num_targets, self._device)
        while self._rows or self.batches:
            self.moments.add(self._rows.pop(0) if self._rows else Rows.centred(*self.batches.pop(0).parts))
        return self.moments

    def select(
        self, features: Tensor, targets: Tensor, enough: float = math.inf, like: Moments | None = None
    ) -> Moments:
        """Return the moments of some features and targets, by index. For `like` see `Moments`.

        Of raw rows only the first are used, up to an effective number of `enough`.
        """
        if self.moments is not None:
            return self.fold().select(features, targets, like)
        while self.batches:
            self._rows.append(Rows.centred(*self.batches.pop(0).parts))
        part = Moments(len(features), len(targets), self._device, like)
        for rows in self._rows:
            if part.effective < enough:
                part.add(rows.select(features, targets))
        return part

    @property
    def _all(self) -> Sequence[Moments | Batch | Rows]:
        return [*([self.moments] if self.moments else []), *self._rows, *self.batches]

    def _open_batch(self, dtype: torch.dtype) -> Batch:
        """Return the batch for the next rows."""
        if not self.batches or self.batches[-1].is_full or self.batches[-1].dtype != dtype:
            self.batches.append(Batch(self.num_features, self.num_targets, dtype, self._device))
        return self.batches[-1]


def product_dtype(x: Tensor, y: Tensor) -> torch.dtype:
    """Return the dtype that rows are multiplied in: float64 if any are, else float32."""
    return torch.promote_types(torch.promote_types(x.dtype, y.dtype), torch.float32)


def check_rows(x: Tensor, y: Tensor, num_features: int, num_targets: int) -> None:
    """Raise `GeometryMismatch` unless x is (n, num_features) and y is (n, num_targets)."""
    if x.shape != (len(y), num_features) or y.shape[1:] != (num_targets,):
        raise GeometryMismatch(
            f"rows {tuple(x.shape)}, {tuple(y.shape)}; allowed: (n, {num_features}), (n, {num_targets})"
        )


def take_columns(rows: Tensor, columns: Tensor) -> Tensor:
    """Return columns of rows (n, p) by index, as a view if they are adjacent."""
    breaks = (columns.diff() != 1).nonzero().flatten() + 1
    if len(breaks) > MAX_RUNS:
        return rows[:, columns]
    runs = [rows[:, int(run[0]) : int(run[-1]) + 1] for run in columns.tensor_split(breaks.cpu()) if len(run)]
    return runs[0] if len(runs) == 1 else torch.cat(runs, dim=1)


def _strips(num_columns: int, width: int) -> Iterator[slice]:
    return (slice(begin, begin + width) for begin in range(0, num_columns, width))


def _centre(rows: Tensor, weights: Tensor) -> Tensor:
    """Subtract the weighted mean from rows (n, p) and scale by the root of the weights, in place; return the mean."""
    share = weights / weights.sum()
    # Twice: the first float32 mean of rows far from 0 is off by more than their last bits.
    first = share.to(rows.dtype) @ rows
    rows -= first
    second = share.to(rows.dtype) @ rows
    rows -= second
    if not bool((weights == 1).all()):
        rows *= weights.sqrt().to(rows.dtype)[:, None]
    return first.double() + second.double()
