"""Composition of two bundles, and differences between two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mappers import FingerprintMismatch, Mapper, MapperError, load, load_manifest, save
from mappers.commands import bundle
from mappers.commands.bundle import differences
from mappers.compose import compose
from tests.mappers.pairs import fit_with, largest_difference, llama, random_cache, saved

GIVEN: dict[str, Any] = {"precision": "float32", "data": "noise", "layers": 2}


@pytest.fixture(scope="module")
def to_sibling(folders: dict[str, Path], documents: list[list[int]]) -> Mapper:
    """From `other`, with two source layers per layer, keys and values jointly."""
    return fit_with(folders["other"], folders["sibling"], documents, joint=True, **GIVEN)


SECOND: dict[str, dict[str, Any]] = {
    "ridge": {},
    "lowrank": {"method": "lowrank", "rank": 4},
    "ridge-head": {"method": "ridge-head", "copies": False},
}


@pytest.fixture(scope="module", params=sorted(SECOND))
def to_large(request: pytest.FixtureRequest, folders: dict[str, Path], documents: list[list[int]]) -> Mapper:
    """From `sibling`, layers 0 and 1 of which are copied unless disabled."""
    return fit_with(folders["sibling"], folders["large"], documents, **GIVEN, **SECOND[request.param])


@pytest.mark.parametrize("start", [0, 37])
def test_a_composed_map_equals_applying_both(to_sibling: Mapper, to_large: Mapper, start: int) -> None:
    composed, cache = compose(to_sibling, to_large), random_cache(3, 20, start)
    expected = to_large.map(to_sibling.map(cache))
    scale = max(float(states.abs().max()) for states in expected.keys + expected.values)
    assert largest_difference(composed.map(cache), expected) < 1e-5 * scale
    assert composed.manifest.source == to_sibling.manifest.source
    assert composed.manifest.target == to_large.manifest.target
    assert composed.manifest.options == {"first": to_sibling.bundle_id, "second": to_large.bundle_id}
    assert composed.refusal() is not None and "has no evaluation" in str(composed.refusal())
    ranks = [[spec.keys.rank for spec in mapper.manifest.layers] for mapper in (composed, to_large)]
    assert ranks[0] == ranks[1]


def test_copies_pass_through(folders: dict[str, Path], documents: list[list[int]], sibling_mapper: Mapper) -> None:
    """A copy of a copy is a copy; a copy of a fitted output keeps its form."""
    lowrank = fit_with(folders["twin"], folders["sibling"], documents, method="lowrank", rank=3, **GIVEN)
    composed = compose(lowrank, sibling_mapper)
    assert [spec.keys.method for spec in composed.manifest.layers] == ["lowrank", "lowrank", "composed", "composed"]
    assert composed.manifest.layers[1].keys == lowrank.manifest.layers[1].keys
    same = fit_with(folders["sibling"], folders["sibling"], documents[:2], precision="float32")
    unchanged, cache = compose(same, sibling_mapper), random_cache(3, 9)
    assert unchanged.manifest.copied_layers == (0, 1)
    assert largest_difference(unchanged.map(cache), sibling_mapper.map(cache)) < 1e-5


def test_maps_without_a_common_model_are_refused(to_sibling: Mapper, sibling_mapper: Mapper) -> None:
    with pytest.raises(FingerprintMismatch, match="maps to large .* maps from other .*allowed: A to B, then B to C"):
        compose(sibling_mapper, to_sibling)


def test_keys_copied_between_different_ropes_are_refused(
    folders: dict[str, Path], documents: list[list[int]], sibling_mapper: Mapper, tmp_path: Path
) -> None:
    """Constructed by hand: a fit never copies such keys."""
    other_rope = llama(1, 3, rope_parameters={"rope_type": "default", "rope_theta": 300.0})
    first = fit_with(saved(other_rope, tmp_path / "other_rope"), folders["sibling"], documents, **GIVEN)
    layers = tuple(
        spec.model_copy(update={"keys": spec.keys.model_copy(update={"method": "copy", "key_layers": (i,)})})
        for i, spec in enumerate(first.manifest.layers)
    )
    copying = Mapper(first.manifest.model_copy(update={"layers": layers}), first.weights)
    with pytest.raises(MapperError, match="copies the keys of layer 0 between models with different RoPE"):
        compose(copying, sibling_mapper)


def test_compose_and_diff_commands(
    to_sibling: Mapper, sibling_mapper: Mapper, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [str(tmp_path / name) for name in ("first", "second", "both")]
    save(to_sibling, names[0])
    save(sibling_mapper, names[1])
    assert bundle.main(["compose", names[0], names[1], "--out", names[2]]) == 0
    composed = load(names[2])
    assert f"bundle {composed.bundle_id} from other to large" in capsys.readouterr().out
    assert load_manifest(names[2]).calibration.num_tokens == sibling_mapper.manifest.calibration.num_tokens
    assert bundle.main(["diff", names[2], names[2]]) == 0
    assert capsys.readouterr().out == "no difference\n"
    assert bundle.main(["diff", names[2], names[1]]) == 0
    output = {line.split("  ")[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "composed" in output["method"] and "ridge" in output["method"] and "other" in output["source"]
    assert "target" not in output
    assert bundle.main(["compose", names[1], names[0], "--out", names[2]]) == 1
    assert "kvrelay bundle: bundle" in capsys.readouterr().err


def test_differences_name_outputs_and_their_relative_distance(twin_mapper: Mapper) -> None:
    weights = {name: tensor.clone() for name, tensor in twin_mapper.weights.items()}
    weights["layers.2.values.weight"] *= 1.1
    rows = differences(Mapper(twin_mapper.manifest, weights), twin_mapper)
    assert [row[0] for row in rows] == ["layer 2 values"]
    assert rows[0][2].endswith("weights differ by 10.0%") and rows[0][1].startswith("ridge of v2 (R² 1.000)")
    weights["layers.0.keys.bias"] += torch.ones(16)
    assert [row[0] for row in differences(Mapper(twin_mapper.manifest, weights), twin_mapper)][0] == "layer 0 keys"
