"""Maps and fits on a CUDA device equal those on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mappers import KVCache, Mapper, QualityProtocol, load, save
from mappers.manifest import MEASURED
from mappers.models import load_model
from tests.mappers.pairs import evaluate_one, fit_with, largest_difference, random_cache, random_documents

pytestmark = pytest.mark.gpu


def moved(cache: KVCache, device: str) -> KVCache:
    return KVCache(tuple(k.to(device) for k in cache.keys), tuple(v.to(device) for v in cache.values), cache.start)


def test_a_map_on_the_gpu_equals_that_on_the_cpu(sibling_mapper: Mapper, tmp_path: Path) -> None:
    save(sibling_mapper, tmp_path / "bundle")
    cache = random_cache(3, 200, start=11)
    mapped = load(tmp_path / "bundle", device="cuda").map(moved(cache, "cuda"))
    assert mapped.keys[0].is_cuda and mapped.values[3].is_cuda
    assert largest_difference(moved(mapped, "cpu"), sibling_mapper.map(cache)) < 1e-3


def test_a_fit_on_the_gpu_is_as_good(folders: dict[str, Path], documents: list[list[int]]) -> None:
    mapper = fit_with(folders["twin"], folders["large"], documents, device="cuda", ridges=(1e-9,), precision="float32")
    models = load_model(folders["twin"], "cuda"), load_model(folders["large"], "cuda")
    protocol = QualityProtocol(lengths=(40,), num_documents=2, head=4, tail=8, scored=16)
    found = evaluate_one(mapper, *models, random_documents(2, 60, seed=3), protocol).arm("hybrid")
    assert found is not None and found.kl_mean < 0.02


@pytest.mark.parametrize(("precision", "half"), MEASURED.items())
def test_halves_are_multiplied_on_the_gpu_as_on_the_cpu(
    sibling_mapper: Mapper, precision: str, half: torch.dtype
) -> None:
    """Features and weights are rounded alike and products summed in float32; a feature may round the other way."""
    manifest = sibling_mapper.manifest.model_copy(update={"precision": precision})
    weights = {name: t.to(half) if name.endswith(".weight") else t for name, t in sibling_mapper.weights.items()}
    cache = random_cache(3, 200, start=11)
    mapped = Mapper(manifest, weights, "cuda").map(moved(cache, "cuda"))
    expected = Mapper(manifest, weights, halves=True).map(cache)
    assert largest_difference(moved(mapped, "cpu"), expected) < 4 * torch.finfo(half).eps
