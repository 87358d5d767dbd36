"""Precisions `mixed` and `bfloat16`: half precision where it costs little, float32 elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mappers import KVCache, Mapper, load, save
from mappers.manifest import KINDS, MEASURED, Manifest
from mappers.models import load_model
from mappers.weights import halve_where_safe
from tests.mappers.pairs import fit_with, largest_difference, random_cache


@pytest.fixture(scope="module", params=["ridge", "lowrank"])
def whole(request: pytest.FixtureRequest, folders: dict[str, Path], documents: list[list[int]]) -> Mapper:
    options: dict[str, Any] = {"rank": 4} if request.param == "lowrank" else {}
    return fit_with(
        folders["other"], folders["large"], documents, method=request.param, layers=2, precision="float32", **options
    )


@pytest.fixture(scope="module")
def models(folders: dict[str, Path]) -> tuple[Any, Any]:
    return load_model(folders["other"]), load_model(folders["large"])


by_precision = pytest.mark.parametrize(("precision", "half"), MEASURED.items())


def largest(cache: KVCache) -> float:
    return max(float(states.abs().max()) for states in (*cache.keys, *cache.values))


def in_precision(mapper: Mapper, precision: str) -> Manifest:
    return mapper.manifest.model_copy(update={"precision": precision})


@by_precision
def test_only_outputs_that_tolerate_it_are_halved(
    twin_mapper: Mapper, folders: dict[str, Path], documents: list[list[int]], precision: str, half: torch.dtype
) -> None:
    """All outputs but one have an error that is large compared with the rounding."""
    noise = torch.Generator().manual_seed(0)
    blurred = {
        name: tensor + 0.1 * torch.randn(tensor.shape, generator=noise) if name.endswith(".weight") else tensor
        for name, tensor in twin_mapper.weights.items()
    }
    blurred["layers.1.keys.weight"] = twin_mapper.weights["layers.1.keys.weight"]
    models = load_model(folders["twin"]), load_model(folders["large"])
    weights = halve_where_safe(in_precision(twin_mapper, precision), blurred, models, documents[:2])
    for layer in range(len(twin_mapper.manifest.layers)):
        for kind in KINDS:
            expected = torch.float32 if (layer, kind) == (1, "keys") else half
            assert weights[f"layers.{layer}.{kind}.weight"].dtype == expected
            assert weights[f"layers.{layer}.{kind}.bias"].dtype == torch.float32


@by_precision
def test_all_parts_of_an_output_are_halved(
    whole: Mapper, models: tuple[Any, Any], documents: list[list[int]], precision: str, half: torch.dtype
) -> None:
    weights = halve_where_safe(in_precision(whole, precision), whole.weights, models, documents[:2])
    assert {tensor.dtype for name, tensor in weights.items() if name.endswith((".weight", ".up"))} == {half}


def test_weights_that_overflow_half_precision_are_kept(
    whole: Mapper, models: tuple[Any, Any], documents: list[list[int]]
) -> None:
    spoilt = dict(whole.weights)
    spoilt["layers.1.keys.weight"] = spoilt["layers.1.keys.weight"] * 1e7
    weights = halve_where_safe(in_precision(whole, "mixed"), spoilt, models, documents[:2])
    assert weights["layers.1.keys.weight"].dtype == torch.float32 != weights["layers.1.values.weight"].dtype


@by_precision
def test_an_exact_map_is_kept_in_float32(
    twin_mapper: Mapper, folders: dict[str, Path], documents: list[list[int]], precision: str, half: torch.dtype
) -> None:
    models = load_model(folders["twin"]), load_model(folders["large"])
    for sample in (documents[:2], []):
        weights = halve_where_safe(in_precision(twin_mapper, precision), twin_mapper.weights, models, sample)
        assert {tensor.dtype for tensor in weights.values()} == {torch.float32}


@by_precision
def test_halves_are_summed_in_float32(whole: Mapper, precision: str, half: torch.dtype) -> None:
    """Products of halves exceed the range of float16 and the digits of both halves; so must their sum."""
    manifest = in_precision(whole, precision)
    last = "up" if manifest.method == "lowrank" else "weight"
    scaled = {name: 100 * tensor if name.endswith(last) else tensor for name, tensor in whole.weights.items()}
    weights = {name: t.to(half) if name.endswith((".weight", ".up")) else t for name, t in scaled.items()}
    cache = random_cache(manifest.source.num_layers, 30, 3)
    large = KVCache(tuple(5e3 * k for k in cache.keys), tuple(5e3 * v for v in cache.values), cache.start)
    halved, plain = (Mapper(manifest, weights, halves=halves).map(large) for halves in (True, None))
    assert largest(plain) > torch.finfo(torch.float16).max
    assert 0 < largest_difference(halved, plain) < 5 * torch.finfo(half).eps * largest(plain)
    rounded = halved.values[1].bfloat16().float()
    assert float((halved.values[1] - rounded).norm() / rounded.norm()) > 1e-4


@by_precision
def test_a_bundle_with_halves_is_fitted_saved_and_loaded(
    folders: dict[str, Path], documents: list[list[int]], tmp_path: Path, precision: Any, half: torch.dtype
) -> None:
    mapper = fit_with(folders["other"], folders["large"], documents, layers=2, precision=precision)
    assert {t.dtype for name, t in mapper.weights.items() if name.endswith(".weight")} == {half}
    save(mapper, tmp_path / "bundle")
    loaded = load(tmp_path / "bundle")
    cache = random_cache(mapper.manifest.source.num_layers, 30)
    assert loaded.bundle_id == mapper.bundle_id and largest_difference(loaded.map(cache), mapper.map(cache)) == 0
