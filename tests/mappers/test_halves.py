"""Precision `mixed`: halves where they cost little, float32 where they would cost more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mappers import KVCache, Mapper, fit, load, save
from mappers.halves import mixed
from mappers.manifest import KINDS
from mappers.models import load_model
from tests.mappers.pairs import largest_difference, random_cache


@pytest.fixture(scope="module", params=["ridge", "lowrank"])
def whole(request: pytest.FixtureRequest, folders: dict[str, Path], documents: list[list[int]]) -> Mapper:
    options: dict[str, Any] = {"rank": 4} if request.param == "lowrank" else {}
    return fit(
        folders["other"], folders["large"], documents, method=request.param, layers=2, precision="float32", **options
    )


@pytest.fixture(scope="module")
def models(folders: dict[str, Path]) -> tuple[Any, Any]:
    return load_model(folders["other"]), load_model(folders["large"])


def largest(cache: KVCache) -> float:
    return max(float(states.abs().max()) for states in (*cache.keys, *cache.values))


def test_outputs_that_bear_it_are_halved_and_others_are_not(
    whole: Mapper, models: tuple[Any, Any], documents: list[list[int]]
) -> None:
    spoilt = dict(whole.weights)
    spoilt["layers.1.keys.weight"] = spoilt["layers.1.keys.weight"] * 1e7  # is infinite as a half
    weights = mixed(whole.manifest, spoilt, models, documents[:2])
    for layer in range(len(whole.manifest.layers)):
        for kind in KINDS:
            expected = torch.float32 if (layer, kind) == (1, "keys") else torch.float16
            assert weights[f"layers.{layer}.{kind}.weight"].dtype == expected
            assert weights[f"layers.{layer}.{kind}.bias"].dtype == torch.float32


def test_a_map_that_misses_nothing_is_left_whole(
    twin_mapper: Mapper, folders: dict[str, Path], documents: list[list[int]]
) -> None:
    models = load_model(folders["twin"]), load_model(folders["large"])
    for sample in (documents[:2], []):
        weights = mixed(twin_mapper.manifest, twin_mapper.weights, models, sample)
        assert {tensor.dtype for tensor in weights.values()} == {torch.float32}


def test_halves_are_summed_in_float32(whole: Mapper) -> None:
    """Products of halves exceed what a half holds; the sum must not."""
    manifest = whole.manifest
    last = "up" if manifest.method == "lowrank" else "weight"
    scaled = {name: 100 * tensor if name.endswith(last) else tensor for name, tensor in whole.weights.items()}
    weights = {name: t.half() if name.endswith((".weight", ".up")) else t for name, t in scaled.items()}
    cache = random_cache(manifest.source.num_layers, 30, 3)
    large = KVCache(tuple(5e3 * k for k in cache.keys), tuple(5e3 * v for v in cache.values), cache.start)
    halved, plain = (Mapper(manifest, weights, halves=halves).map(large) for halves in (True, None))
    assert largest(plain) > torch.finfo(torch.float16).max
    assert 0 < largest_difference(halved, plain) < 5e-3 * largest(plain)


def test_a_mixed_bundle_is_fitted_saved_and_loaded(
    folders: dict[str, Path], documents: list[list[int]], tmp_path: Path
) -> None:
    mapper = fit(folders["other"], folders["large"], documents, layers=2, precision="mixed")
    assert {t.dtype for name, t in mapper.weights.items() if name.endswith(".weight")} == {torch.float16}
    save(mapper, tmp_path / "bundle")
    loaded = load(tmp_path / "bundle")
    cache = random_cache(mapper.manifest.source.num_layers, 30)
    assert loaded.bundle_id == mapper.bundle_id and largest_difference(loaded.map(cache), mapper.map(cache)) == 0
