from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from mappers import GeometryMismatch
from mappers.stats import MAX_RUNS, MAX_SHARED, RESOLUTION, STRIP, Moments, take_columns


def rows(
    count: int, features: int, targets: int, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return data far from the origin, where uncentred sums lose precision."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, features, generator=generator, dtype=dtype) + 1000
    return x, torch.randn(count, targets, generator=generator, dtype=dtype) - 500


def moments_of(x: torch.Tensor, y: torch.Tensor, *sizes: int) -> Moments:
    moments = Moments(x.shape[1], y.shape[1])
    for part_x, part_y in zip(x.split(list(sizes)), y.split(list(sizes)), strict=True):
        moments.update(part_x, part_y)
    return moments


def assert_equal(left: Moments, right: Moments) -> None:
    assert (left.count, left.mass, left.squares) == (right.count, right.mass, right.squares)
    for name in ("mean_x", "mean_y", "xy", "yy"):
        torch.testing.assert_close(getattr(left, name), getattr(right, name), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(left.gram(), right.gram(), rtol=1e-9, atol=1e-9)


def test_streamed_moments_match_the_definition() -> None:
    x, y = rows(300, STRIP + 40, 7)
    moments = moments_of(x, y, 1, 99, 0, 200)
    x, y = x.double() - x.double().mean(0), y.double() - y.double().mean(0)
    torch.testing.assert_close(moments.gram(), x.T @ x, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(moments.xy, x.T @ y, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(moments.yy, y.square().sum(0), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_lower_precision_are_within_their_resolution(dtype: torch.dtype) -> None:
    """For columns far from the origin, and batches whose means differ."""
    x, y = rows(3000, STRIP + 40, 7, torch.float32)
    x[1000:] += 5
    x, y = x.to(dtype), y.to(dtype)
    found, exact = moments_of(x, y, 1000, 2000), moments_of(x.double(), y.double(), 1000, 2000)
    spread_x, spread_y = exact.gram().diagonal().sqrt(), exact.yy.sqrt()
    assert (found.resolution, exact.resolution) == (RESOLUTION[torch.float32], RESOLUTION[torch.float64])
    assert ((found.gram() - exact.gram()).abs() / spread_x / spread_x[:, None]).max() < found.resolution
    assert ((found.xy - exact.xy).abs() / spread_y / spread_x[:, None]).max() < found.resolution
    assert (found.yy / exact.yy - 1).abs().max() < found.resolution
    for mean, right in ((found.mean_x, exact.mean_x), (found.mean_y, exact.mean_y)):
        torch.testing.assert_close(mean, right, rtol=1e-8, atol=0)


def test_merged_moments_equal_one_pass() -> None:
    x, y = rows(200, 12, 5)
    left, right = moments_of(x[:70], y[:70], 70), moments_of(x[70:], y[70:], 100, 30)
    left.merge(right)
    left.merge(Moments(12, 5))
    assert_equal(left, moments_of(x, y, 200))


def test_a_weight_counts_as_repeated_rows() -> None:
    x, y = rows(60, 8, 3)
    times = torch.randint(1, 4, (60,), generator=torch.Generator().manual_seed(0))
    weighted, other = Moments(8, 3), Moments(8, 3)
    weighted.update(x[:40], y[:40], times[:40])
    other.update(x[40:], y[40:], times[40:])
    weighted.merge(other)
    repeated = moments_of(x.repeat_interleave(times, 0), y.repeat_interleave(times, 0), int(times.sum()))
    for name in ("mean_x", "mean_y", "xy", "yy"):
        torch.testing.assert_close(getattr(weighted, name), getattr(repeated, name), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(weighted.gram(), repeated.gram(), rtol=1e-9, atol=1e-9)
    assert (weighted.count, weighted.mass) == (60, float(times.sum()))
    assert weighted.effective == pytest.approx(float(times.sum()) ** 2 / float(times.square().sum()))
    assert repeated.effective == repeated.count


def test_a_gram_matrix_can_grow_after_access() -> None:
    x, y = rows(90, STRIP + 30, 2)
    moments = moments_of(x[:30], y[:30], 30)
    moments.gram()
    moments.update(x[30:60], y[30:60])
    moments.merge(moments_of(x[60:], y[60:], 30))
    assert_equal(moments, moments_of(x, y, 90))


def test_merging_into_empty_moments_is_a_copy() -> None:
    x, y = rows(50, 6, 2)
    empty, full = Moments(6, 2), moments_of(x, y, 50)
    empty.merge(full)
    assert_equal(empty, full)


def test_a_selection_equals_moments_of_those_columns() -> None:
    x, y = rows(80, 10, 6)
    features, targets = torch.tensor([1, 4, 7]), torch.tensor([5, 0])
    assert_equal(moments_of(x, y, 80).select(features, targets), moments_of(x[:, features], y[:, targets], 80))


@pytest.mark.parametrize("columns", [range(3, 9), range(0, 3 * MAX_RUNS, 2), [5, 1, 2, 9]])
def test_columns_are_taken_in_any_order(columns: Sequence[int]) -> None:
    x, _ = rows(4, 4 * MAX_RUNS, 1)
    assert torch.equal(take_columns(x, torch.tensor(columns)), x[:, list(columns)])


@pytest.mark.parametrize(("num_features", "is_kept"), [(3, True), (MAX_SHARED + 1, False)])
def test_results_for_many_features_are_not_cached(num_features: int, is_kept: bool) -> None:
    moments = Moments(num_features, 1)
    assert (moments.of_features("key", object) is moments.of_features("key", object)) is is_kept


def test_memory_matches_bytes_for() -> None:
    moments = Moments(20, 30)
    tensors = (moments.mean_x, moments.mean_y, moments.xx, moments.xy, moments.yy)
    assert Moments.bytes_for(20, 30) == sum(tensor.numel() * 8 for tensor in tensors)


def test_other_shapes_are_refused() -> None:
    moments = Moments(4, 2)
    with pytest.raises(GeometryMismatch, match=r"\(5, 3\)"):
        moments.update(torch.zeros(5, 3), torch.zeros(5, 2))
    with pytest.raises(GeometryMismatch, match="do not merge"):
        moments.merge(Moments(4, 3))
