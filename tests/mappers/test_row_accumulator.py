from __future__ import annotations

import pytest
import torch

from mappers import GeometryMismatch
from mappers.stats import BATCH, RESOLUTION, Moments, RowAccumulator

COUNT = 2 * BATCH + 100
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(COUNT, 7, generator=GENERATOR, dtype=torch.float64) + 30
Y = torch.randn(COUNT, 4, generator=GENERATOR, dtype=torch.float64)
WEIGHTS = torch.rand(COUNT, generator=GENERATOR, dtype=torch.float64)
FEATURES, TARGETS = torch.tensor([1, 2, 5]), torch.tensor([3, 0])


def accumulated(*sizes: int, dtype: torch.dtype = torch.float64) -> RowAccumulator:
    made = RowAccumulator(7, 4)
    for x, y, weights in zip(*(rows.split(list(sizes)) for rows in (X.to(dtype), Y.to(dtype), WEIGHTS)), strict=True):
        made.update(x, y, weights)
    return made


def assert_moments_of(found: Moments, x: torch.Tensor, y: torch.Tensor, weights: torch.Tensor) -> None:
    expected = Moments(x.shape[1], y.shape[1])
    expected.update(x, y, weights)
    torch.testing.assert_close(found.gram(), expected.gram())
    for part in ("xy", "yy", "mean_x", "mean_y"):
        torch.testing.assert_close(getattr(found, part), getattr(expected, part))
    assert found.count == expected.count and found.effective == pytest.approx(expected.effective)


@pytest.mark.parametrize("sizes", [(COUNT,), (1, 0, BATCH - 1, 7, COUNT - BATCH - 7)])
def test_columns_have_the_same_moments_before_and_after_folding(sizes: tuple[int, ...]) -> None:
    made = accumulated(*sizes)
    assert made.count == COUNT and len(made.batches) == 3
    effective = made.effective
    assert_moments_of(made.select(FEATURES, TARGETS), X[:, FEATURES], Y[:, TARGETS], WEIGHTS)
    assert_moments_of(made.fold(), X, Y, WEIGHTS)
    assert_moments_of(made.select(FEATURES, TARGETS), X[:, FEATURES], Y[:, TARGETS], WEIGHTS)
    assert made.effective == pytest.approx(effective)


@pytest.mark.parametrize("is_folded", [False, True])
def test_targets_of_the_same_features_share_results(is_folded: bool) -> None:
    made = accumulated(COUNT)
    if is_folded:
        made.fold()
    first, second = TARGETS[:1], TARGETS[1:]
    one = made.select(FEATURES, first)
    other = made.select(FEATURES, second, like=one)
    assert_moments_of(other, X[:, FEATURES], Y[:, second], WEIGHTS)
    assert_moments_of(one, X[:, FEATURES], Y[:, first], WEIGHTS)
    results = [moments.of_features("key", object) for moments in (one, other, made.select(FEATURES, first))]
    assert results[0] is results[1] is not results[2]


def test_after_folding_at_most_one_batch_is_buffered() -> None:
    made = RowAccumulator(7, 4)
    made.fold()
    for x, y, weights in zip(X.split(900), Y.split(900), WEIGHTS.split(900), strict=True):
        made.update(x, y, weights)
        assert sum(batch.count for batch in made.batches) < BATCH
    assert_moments_of(made.select(FEATURES, TARGETS), X[:, FEATURES], Y[:, TARGETS], WEIGHTS)
    assert made.batches == []


def test_select_uses_only_as_many_rows_as_needed() -> None:
    made = accumulated(COUNT)
    assert made.select(FEATURES, TARGETS, enough=10).count == BATCH
    assert made.select(FEATURES, TARGETS, enough=BATCH).count == 2 * BATCH  # a weighted batch counts as fewer
    assert made.select(FEATURES, TARGETS, enough=10 * COUNT).count == COUNT


def test_rows_are_multiplied_in_their_own_precision() -> None:
    made = accumulated(COUNT, dtype=torch.float32)
    assert made.select(FEATURES, TARGETS).resolution == RESOLUTION[torch.float32]
    assert accumulated(COUNT).select(FEATURES, TARGETS).resolution == RESOLUTION[torch.float64]
    both = accumulated(COUNT, dtype=torch.bfloat16)
    both.update(X, Y)
    assert [batch.dtype for batch in both.batches] == [torch.float32] * 3 + [torch.float64] * 3


def test_other_shapes_are_refused() -> None:
    with pytest.raises(GeometryMismatch, match=r"rows \(5, 3\), \(5, 4\); allowed: \(n, 7\), \(n, 4\)"):
        RowAccumulator(7, 4).update(torch.zeros(5, 3), torch.zeros(5, 4))
