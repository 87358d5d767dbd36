"""The committed families: their models can be built here, and their bundles match them and pass their gates."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import mappers
from mappers.errors import FingerprintMismatch, UnknownFamily
from mappers.families import ModelFamily, find_family
from mappers.fingerprint import RECIPE_FILE, file_digest


@pytest.fixture(scope="module", params=[pytest.param("smol", marks=pytest.mark.slow), "tiny"])
def family(request: pytest.FixtureRequest) -> ModelFamily:
    family = find_family(request.param)
    family.prepare(lambda _: None)
    return family


@pytest.fixture(scope="module")
def smol() -> ModelFamily:
    family = find_family("smol")
    family.prepare(lambda _: None)
    return family


def test_bundle_matches_its_family_and_passes_its_gate(family: ModelFamily) -> None:
    mapper = mappers.load(family.bundle)
    mapper.check(mappers.fingerprint(family.source), mappers.fingerprint(family.target))
    assert mapper.refusal() is None


def test_committed_weights_stay_under_30_mb() -> None:
    families = Path(find_family("tiny").source).parents[1]
    assert sum(path.stat().st_size for path in families.rglob("*.safetensors")) < 30_000_000


def test_unknown_family_error_lists_known_families() -> None:
    with pytest.raises(UnknownFamily, match="'smoll' is neither a bundle nor a family; known families: smol, tiny"):
        find_family("smoll")


@pytest.mark.slow
def test_smol_small_keeps_the_lower_layers_bit_for_bit(smol: ModelFamily) -> None:
    with (
        safe_open(smol.source / "model.safetensors", framework="pt") as small,
        safe_open(smol.target / "model.safetensors", framework="pt") as large,
    ):
        lower = [name for name in small.keys() if name.startswith("model.layers.17.")]
        assert lower
        for name in lower:
            assert torch.equal(small.get_tensor(name), large.get_tensor(name))
    assert json.loads((smol.source / "config.json").read_text())["num_hidden_layers"] == 24


@pytest.mark.slow
def test_fingerprint_check_ignores_rounding_of_built_weights(smol: ModelFamily, tmp_path: Path) -> None:
    """One weight differs by one unit in the last place, as on another processor."""
    folder = tmp_path / "smol-small"
    shutil.copytree(smol.source, folder)
    tensors = load_file(folder / "model.safetensors")
    weight = tensors["model.layers.20.mlp.down_proj.weight"]
    weight[0, 0] = torch.nextafter(weight[0, 0], torch.tensor(torch.inf))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    record = json.loads((folder / RECIPE_FILE).read_text())
    assert file_digest(folder / "model.safetensors") != record["output_digest"]
    mapper = mappers.load(smol.bundle)
    with pytest.raises(FingerprintMismatch):  # the output digest no longer matches
        mapper.check(mappers.fingerprint(folder), mappers.fingerprint(smol.target))
    record["output_digest"] = file_digest(folder / "model.safetensors")
    (folder / RECIPE_FILE).write_text(json.dumps(record))
    mapper.check(mappers.fingerprint(folder), mappers.fingerprint(smol.target))
