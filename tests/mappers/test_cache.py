from __future__ import annotations

import pytest
import torch

from mappers import GeometryMismatch, KVCache, KVGeometry
from tests.mappers.pairs import HEAD_DIM, KV_HEADS, largest_difference, random_cache


def test_a_cache_knows_its_shape_and_positions() -> None:
    cache = random_cache(3, 5, start=10)
    assert cache.geometry == KVGeometry(3, KV_HEADS, HEAD_DIM)
    assert cache.geometry.width == KV_HEADS * HEAD_DIM
    assert cache.positions.tolist() == [10, 11, 12, 13, 14]


def test_concatenated_slices_equal_the_cache() -> None:
    cache = random_cache(2, 9, start=3)
    joined = KVCache.concatenate([cache.slice(0, 4), cache.slice(4, 5), cache.slice(5, 9)])
    assert joined.start == 3 and largest_difference(joined, cache) == 0


def test_parts_with_a_gap_are_refused() -> None:
    cache = random_cache(2, 9)
    with pytest.raises(GeometryMismatch, match="starts at 5 cannot follow one that ends at 4"):
        KVCache.concatenate([cache.slice(0, 4), cache.slice(5, 9)])


@pytest.mark.parametrize("shape", [(2, 5), (2, 6, 8), (3, 5, 8)])
def test_layers_of_different_shapes_are_refused(shape: tuple[int, ...]) -> None:
    good = torch.zeros(2, 5, 8)
    with pytest.raises(GeometryMismatch, match="layer 1"):
        KVCache((good, torch.zeros(shape)), (good, good))


def test_no_layers_are_refused() -> None:
    with pytest.raises(GeometryMismatch):
        KVCache((), ())


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn])
def test_a_quantised_cache_is_refused(dtype: torch.dtype) -> None:
    good, quantised = torch.zeros(2, 5, 8), torch.zeros(2, 5, 8).to(dtype)
    with pytest.raises(GeometryMismatch, match=f"values of {dtype}; a cache must not be quantised"):
        KVCache((good,), (quantised,))
