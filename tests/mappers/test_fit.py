from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mappers import (
    CalibrationTooSmall,
    FitSettings,
    Mapper,
    MapperError,
    QualityGate,
    TokenizerMismatch,
    UnknownMethod,
    UnsupportedModel,
    fingerprint,
    methods,
)
from mappers.collect import (
    HELD_OUT_EVERY,
    MAX_DOCUMENT_TOKENS,
    ROWS_BYTES,
    collect,
    max_buffered_rows,
    statistics_bytes,
)
from mappers.manifest import KINDS
from mappers.model_config import geometry_of
from mappers.models import load_model, log_probs, prefill, run
from mappers.rope import Rope
from mappers.stats import BATCH, Moments, RowAccumulator
from tests.mappers.pairs import add_tokenizer, fit_with, largest_difference, llama, random_documents, saved

FRESH = random_documents(1, 80, seed=77)[0]


def test_a_planted_map_between_two_models_is_recovered(twin_mapper: Mapper, folders: dict[str, Path]) -> None:
    source, target = prefill(load_model(folders["twin"]), FRESH), prefill(load_model(folders["large"]), FRESH)
    mapped, native = twin_mapper.map(source).slice(4, 80), target.slice(4, 80)
    assert largest_difference(source.slice(4, 80), native) > 1
    for kind in KINDS:
        for found, expected in zip(mapped.of(kind), native.of(kind), strict=True):
            assert float((found - expected).norm() / expected.norm()) < 1e-4


def test_no_more_source_layers_are_taken_than_help(twin_mapper: Mapper) -> None:
    for layer, spec in enumerate(twin_mapper.manifest.layers):
        assert spec.keys.key_layers == spec.values.value_layers == (layer,)
        assert spec.keys.r2 is not None and spec.keys.r2 > 0.999


@pytest.mark.parametrize("name", sorted(methods.METHODS))
def test_a_model_mapped_to_itself_gives_its_own_log_probs(
    folders: dict[str, Path], documents: list[list[int]], name: str
) -> None:
    mapper = fit_with(folders["large"], folders["large"], documents[:4], method=name)
    model = load_model(folders["large"])
    assert mapper.manifest.copied_layers == (0, 1, 2, 3)
    past = mapper.map(prefill(model, FRESH[:50]))
    native, mapped = run(model, FRESH)[1][50:], run(model, FRESH[50:], past)[1]
    assert (log_probs(model, native) - log_probs(model, mapped)).abs().max() <= 1e-4


def test_shared_layers_are_copied_and_the_rest_is_fitted(sibling_mapper: Mapper) -> None:
    assert sibling_mapper.manifest.copied_layers == (0, 1)
    assert [spec.keys.method for spec in sibling_mapper.manifest.layers] == ["copy", "copy", "ridge", "ridge"]
    # Layer 2 of the target has the same input as layer 2 of the sibling, but another projection.
    assert sibling_mapper.manifest.layers[2].values.r2 is not None


def test_copies_can_be_disabled(folders: dict[str, Path], documents: list[list[int]]) -> None:
    mapper = fit_with(folders["sibling"], folders["large"], documents, copies=False)
    assert mapper.manifest.copied_layers == ()
    assert mapper.manifest.layers[1].keys.r2 is not None and mapper.manifest.layers[1].keys.r2 > 0.999


def test_layers_equal_only_in_the_first_document_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    """The two models differ in the embedding of one token, which the first document does not contain."""
    model = load_model(folders["large"])
    model.model.embed_tokens.weight[63].mul_(-1)
    saved(model, tmp_path / "odd")
    documents = [[i % 63 for i in range(80)], *random_documents(3, 80)]
    with pytest.raises(
        MapperError, match="keys of target layer 0 equal those of source layer 0 in the first document, but differ"
    ):
        fit_with(tmp_path / "odd", folders["large"], documents)
    assert fit_with(tmp_path / "odd", folders["large"], documents, copies=False, layers=1).manifest.copied_layers == ()


def test_keys_may_be_copied_without_values(
    folders: dict[str, Path], documents: list[list[int]], tmp_path: Path
) -> None:
    model = load_model(folders["large"])
    model.model.layers[0].self_attn.v_proj.weight.mul_(2)
    model.model.layers[0].self_attn.o_proj.weight.div_(2)
    mapper = fit_with(saved(model, tmp_path / "doubled"), folders["large"], documents)
    first = mapper.manifest.layers[0]
    assert (first.keys.method, first.values.method) == ("copy", "ridge")
    assert mapper.manifest.copied_layers == (1, 2, 3)


def test_keys_under_another_rope_are_not_copied(
    folders: dict[str, Path], documents: list[list[int]], tmp_path: Path
) -> None:
    other = llama(1, 4, rope_parameters={"rope_type": "default", "rope_theta": 300.0})
    mapper = fit_with(saved(other, tmp_path / "other"), folders["large"], documents)
    assert mapper.manifest.layers[0].keys.method == "ridge" and mapper.manifest.layers[0].values.method == "copy"
    assert mapper.manifest.layers[0].keys.r2 is not None and mapper.manifest.layers[0].keys.r2 > 0.999


def test_joint_features_explain_at_least_as_much(folders: dict[str, Path], documents: list[list[int]]) -> None:
    apart = fit_with(folders["other"], folders["large"], documents, layers=2)
    joint = fit_with(folders["other"], folders["large"], documents, layers=2, joint=True)
    spec = joint.manifest.layers[0].keys
    assert spec.key_layers == spec.value_layers != ()

    def mean_r2(mapper: Mapper) -> float:
        r2 = [spec.of(kind).r2 or 0.0 for spec in mapper.manifest.layers for kind in KINDS]
        return sum(r2) / len(r2)

    assert mean_r2(joint) > mean_r2(apart)


def test_the_manifest_records_models_and_calibration(
    twin_mapper: Mapper, folders: dict[str, Path], documents: list[list[int]]
) -> None:
    manifest = twin_mapper.manifest
    assert (manifest.source.name, manifest.target.name) == ("twin", "large")
    assert manifest.source.fingerprint == fingerprint(folders["twin"])
    assert manifest.calibration.num_tokens == sum(map(len, documents))
    assert (manifest.calibration.name, manifest.calibration.num_documents) == ("noise", len(documents))
    assert str(folders["twin"].parent) not in manifest.model_dump_json()
    again = fit_with(folders["twin"], folders["large"], documents[::-1], precision="float32")
    assert again.manifest.calibration.digest != manifest.calibration.digest


def test_the_number_of_tokens_is_bounded(folders: dict[str, Path], documents: list[list[int]]) -> None:
    progress: list[tuple[int, int | None]] = []
    mapper = fit_with(
        folders["twin"], folders["large"], documents, layers=1, tokens=500, progress=lambda *done: progress.append(done)
    )
    assert mapper.manifest.calibration.num_tokens == 576 == progress[-1][0]
    assert progress[0] == (96, 500)


def test_the_head_of_every_document_is_skipped(folders: dict[str, Path]) -> None:
    models = load_model(folders["twin"]), load_model(folders["large"])
    ropes = Rope.of(models[0]), Rope.of(models[1])
    documents = random_documents(5, 30)
    collected = collect(models, ropes, documents, FitSettings())
    for group in collected.groups:
        assert group.train.count + group.held_out.count == 5 * (30 - 4)
        assert group.held_out.count == 26 * len([i for i in range(5) if i % HELD_OUT_EVERY == 1])
    rows = [prefill(models[0], ids).slice(4, 30).values[2].transpose(0, 1).flatten(1) for ids in documents]
    train = torch.cat([row for i, row in enumerate(rows) if i % HELD_OUT_EVERY != 1]).double()
    features = collected.groups[1].features([("values", 2)])
    mean = collected.groups[1].train.fold().mean_x
    torch.testing.assert_close(mean[features], train.mean(0))


@pytest.mark.parametrize("joint", [False, True])
def test_the_planned_memory_matches_the_statistics(folders: dict[str, Path], joint: bool) -> None:
    models = load_model(folders["twin"]), load_model(folders["large"])
    ropes = Rope.of(models[0]), Rope.of(models[1])
    settings = FitSettings(joint=joint, copies=False)
    collected = collect(models, ropes, random_documents(2, 30), settings)
    sizes = [(group.train.num_features, group.train.num_targets) for group in collected.groups]
    moments, row = (
        sum(2 * Moments.bytes_for(*size) for size in sizes),
        sum(RowAccumulator.bytes_for(*size) for size in sizes),
    )
    source, target = (geometry_of(model.config) for model in models)
    assert statistics_bytes(source, target, settings) == moments + max_buffered_rows(sizes) * row
    few = statistics_bytes(source, target, settings, max_tokens=1000)
    assert few == moments + (1000 + MAX_DOCUMENT_TOKENS) * row


def test_rows_are_buffered_while_they_take_less_memory_than_moments() -> None:
    assert max_buffered_rows([(48, 64)]) == 2 * BATCH  # fewer would not fill a batch
    assert max_buffered_rows([(4608, 1728)]) == 2 * Moments.bytes_for(4608, 1728) // RowAccumulator.bytes_for(
        4608, 1728
    )
    assert max_buffered_rows([(9216, 9216)] * 2) == ROWS_BYTES // (2 * RowAccumulator.bytes_for(9216, 9216))


def test_a_bundle_carries_its_own_gate(folders: dict[str, Path], documents: list[list[int]]) -> None:
    mapper = fit_with(
        folders["large"], folders["large"], documents[:2], gate=QualityGate(max_ppl_ratio=9, min_top1=0.1)
    )
    assert mapper.manifest.gate == QualityGate(max_ppl_ratio=9, min_top1=0.1)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"method": "rige"}, UnknownMethod, "known: hidden, identity"),
        ({"layers": 0}, MapperError, "layers is 0"),
        ({"head": -1}, MapperError, "head is -1"),
        ({"method": "procrustes", "joint": True}, MapperError, "method procrustes does not support joint"),
        ({"precision": "int8"}, MapperError, "precision is 'int8'; allowed: float16, float32, mixed"),
        ({"tokens": 100}, CalibrationTooSmall, "100 tokens for 64 features; at least 256"),
    ],
)
def test_impossible_settings_are_refused(
    folders: dict[str, Path], documents: list[list[int]], settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        fit_with(folders["twin"], folders["large"], documents, **settings)


@pytest.mark.parametrize(
    ("used", "message"),
    [(0, "no document of more than 5 tokens"), (1, "one document"), (4, "276 tokens for 64 features; at least 512")],
)
def test_too_few_documents_are_refused(
    folders: dict[str, Path], documents: list[list[int]], used: int, message: str
) -> None:
    with pytest.raises(CalibrationTooSmall, match=message):
        fit_with(folders["twin"], folders["large"], documents[:used], tokens_per_feature=8.0)


def test_short_documents_are_skipped(folders: dict[str, Path], documents: list[list[int]]) -> None:
    mapper = fit_with(folders["twin"], folders["large"], [[1, 2, 3], *documents], method="identity")
    assert mapper.manifest.calibration.num_documents == len(documents)


def test_models_with_different_tokenizers_are_refused(tmp_path: Path) -> None:
    model = llama(0, 2)
    for name, words in (("a", ["x", "y"]), ("b", ["y", "x"])):
        add_tokenizer(saved(model, tmp_path / name), words)
    with pytest.raises(TokenizerMismatch, match="different tokenizers"):
        fit_with(tmp_path / "a", tmp_path / "b", random_documents(2, 40))


def test_a_folder_without_a_model_is_refused(tmp_path: Path, folders: dict[str, Path]) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UnsupportedModel, match="no model at"):
        fit_with(tmp_path / "empty", folders["large"], random_documents(2, 40))


def test_weights_that_overflow_the_precision_are_refused(
    folders: dict[str, Path], documents: list[list[int]], tmp_path: Path
) -> None:
    faint = load_model(folders["twin"])
    for layer in faint.model.layers:
        layer.self_attn.v_proj.weight.mul_(1e-6)
        layer.self_attn.o_proj.weight.mul_(1e6)
    with pytest.raises(MapperError, match="is too large for torch.float16; allowed: float32"):
        fit_with(saved(faint, tmp_path / "faint"), folders["large"], documents)
