from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from mappers import (
    ArmScore,
    BundleCorrupt,
    Evaluation,
    FingerprintMismatch,
    Mapper,
    MapperError,
    QualityGate,
    TokenizerMismatch,
    load,
    load_manifest,
    save,
)
from mappers.bundle import MANIFEST, REPORT, WEIGHTS, seal, update, verify
from mappers.manifest import LengthScores, digest_of
from tests.mappers.pairs import largest_difference, random_cache


@pytest.fixture
def bundle(twin_mapper: Mapper, tmp_path: Path) -> Path:
    save(twin_mapper, tmp_path / "bundle")
    return tmp_path / "bundle"


def evaluation(
    ppl_ratio: float = 1.1,
    top1: float = 0.9,
    arm: str = "hybrid",
    documents: int = 50,
    lengths: tuple[int, ...] = (384, 1024, 2048),
    **changes: Any,
) -> Evaluation:
    score = ArmScore(arm=arm, ppl_ratio=ppl_ratio, ppl_low=1, ppl_high=2, top1=top1, kl_mean=0, kl_p95=0)
    at = tuple(LengthScores(length=length, num_documents=documents, arms=(score,)) for length in lengths)
    settings: dict[str, Any] = {"data": "noise", "head": 4, "tail": 64, "scored": 128, "tokens": 128} | changes
    return Evaluation(**settings, arms=(score,), lengths=at)


def rewrite(bundle: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the manifest and update its digest, as an attacker would."""
    manifest = json.loads((bundle / MANIFEST).read_text())
    change(manifest)
    manifest["digest"] = digest_of(manifest)
    (bundle / MANIFEST).write_text(json.dumps(manifest))


def test_a_loaded_bundle_equals_the_saved_one(bundle: Path, twin_mapper: Mapper) -> None:
    loaded, cache = load(bundle), random_cache(4, 20, start=7)
    assert loaded.bundle_id == twin_mapper.bundle_id
    assert largest_difference(loaded.map(cache), twin_mapper.map(cache)) == 0
    assert loaded.manifest.source.geometry == cache.geometry


def test_a_bundle_is_two_files_without_pickle(bundle: Path) -> None:
    assert {path.name for path in bundle.iterdir()} == {MANIFEST, WEIGHTS}
    assert [path.name for path in bundle.parent.iterdir()] == ["bundle"]


@pytest.mark.parametrize("name", [MANIFEST, WEIGHTS])
def test_any_corrupted_byte_is_detected(bundle: Path, name: str) -> None:
    intact = (bundle / name).read_bytes()
    for at in range(0, len(intact), max(1, len(intact) // 40)):
        broken = bytearray(intact)
        broken[at] ^= 1
        (bundle / name).write_bytes(broken)
        with pytest.raises(BundleCorrupt):
            load(bundle)
    (bundle / name).write_bytes(intact)
    load(bundle)


@pytest.mark.parametrize("name", [MANIFEST, WEIGHTS])
def test_a_missing_file_is_reported(bundle: Path, name: str) -> None:
    (bundle / name).unlink()
    with pytest.raises(BundleCorrupt, match="No such file"):
        load(bundle)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format_version": 2}'])
def test_a_manifest_of_another_format_is_refused(bundle: Path, text: str) -> None:
    (bundle / MANIFEST).write_text(text)
    with pytest.raises(BundleCorrupt, match="is not JSON|format version"):
        load(bundle)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.pop("method"),
        lambda m: m.update(surprise=1),
        lambda m: m["layers"].pop(),
        lambda m: m["layers"][0]["keys"].update(key_layers=[4]),
        lambda m: m["layers"][0]["keys"].update(key_layers=[]),
        lambda m: m["layers"][0]["keys"].update(key_layers=[0, 1]),
        lambda m: m["layers"][0]["keys"].update(method="copy", key_layers=[], value_layers=[0]),
        lambda m: m["layers"][0]["keys"].update(method="copy", key_layers=[0, 1]),
        lambda m: m["source"].update(head_dim=16),
        lambda m: m["target"]["config"]["rope_parameters"].update(rope_theta=500.0),
    ],
)
def test_an_inconsistent_manifest_with_a_valid_digest_is_refused(
    bundle: Path, change: Callable[[dict[str, Any]], Any]
) -> None:
    rewrite(bundle, change)
    with pytest.raises(BundleCorrupt):
        load(bundle)


def test_weights_of_another_shape_are_refused(twin_mapper: Mapper) -> None:
    weights = dict(twin_mapper.weights)
    weights["layers.0.keys.bias"] = torch.zeros(3)
    with pytest.raises(BundleCorrupt, match=r"'layers\.0\.keys\.bias'.*\(16,\).*\(3,\)"):
        Mapper(twin_mapper.manifest, weights)


def test_malformed_weights_with_a_valid_digest_are_refused(bundle: Path) -> None:
    (bundle / WEIGHTS).write_bytes(b"no tensors")
    rewrite(bundle, lambda m: m.update(weights_sha256=hashlib.sha256(b"no tensors").hexdigest()))
    with pytest.raises(BundleCorrupt, match=r"weights\.safetensors"):
        load(bundle)


def test_saving_replaces_only_bundles(bundle: Path, sibling_mapper: Mapper, tmp_path: Path) -> None:
    save(sibling_mapper, bundle)
    assert load(bundle).manifest.copied_layers == (0, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]
    (tmp_path / "photos").mkdir()
    with pytest.raises(MapperError, match="photos exists and is not a bundle"):
        save(sibling_mapper, tmp_path / "photos")


def test_a_failed_save_leaves_the_old_bundle(bundle: Path, twin_mapper: Mapper) -> None:
    broken = Mapper(twin_mapper.manifest, twin_mapper.weights)
    broken.weights = {"layers.0.keys.bias": torch.zeros(3)}
    before = load(bundle).bundle_id
    with pytest.raises(BundleCorrupt):
        save(broken, bundle)
    assert load(bundle).bundle_id == before and [path.name for path in bundle.parent.iterdir()] == ["bundle"]


def test_copied_layers_store_nothing(sibling_mapper: Mapper, tmp_path: Path) -> None:
    save(sibling_mapper, tmp_path / "bundle")
    names = safetensors.torch.load_file(tmp_path / "bundle" / WEIGHTS)
    assert {name.split(".")[1] for name in names if name.startswith("layers.")} == {"2", "3"}


def test_storing_an_evaluation_keeps_the_id(bundle: Path) -> None:
    before = load(bundle).bundle_id
    update(bundle, evaluation=evaluation(), gate=QualityGate(max_ppl_ratio=3))
    after = load(bundle)
    assert after.bundle_id == before and len(before) == 16
    assert after.manifest.evaluation == evaluation() and after.manifest.gate == QualityGate(max_ppl_ratio=3)


def test_a_report_is_stored_with_the_evaluation_and_verified(bundle: Path) -> None:
    before = json.loads((bundle / MANIFEST).read_text())
    assert "report_sha256" not in before, "a bundle without a report has the fields of older versions"
    update(bundle, evaluation=evaluation(), report="<html>ä</html>")
    assert verify(bundle).bundle_id == load_manifest(bundle).bundle_id
    assert (bundle / REPORT).read_text() == "<html>ä</html>"
    update(bundle, gate=QualityGate(max_ppl_ratio=3))
    verify(bundle)
    (bundle / REPORT).write_text("<html>a</html>")
    load(bundle)  # mapping does not need the report
    with pytest.raises(BundleCorrupt, match=r"report\.html does not match its digest"):
        verify(bundle)
    (bundle / REPORT).unlink()
    with pytest.raises(BundleCorrupt, match=r"cannot read .*report\.html"):
        verify(bundle)
    update(bundle, evaluation=evaluation(), report="<html>a</html>")
    verify(bundle)


def test_a_new_evaluation_removes_the_old_report(bundle: Path, tmp_path: Path) -> None:
    update(bundle, evaluation=evaluation(), report="<html>")
    copied = save(load(bundle), tmp_path / "copy")
    assert copied.manifest.evaluation == evaluation() and verify(tmp_path / "copy").bundle_id == copied.bundle_id
    update(bundle, evaluation=evaluation(1.2))
    assert {path.name for path in bundle.iterdir()} == {MANIFEST, WEIGHTS}
    assert verify(bundle).manifest.report_sha256 == ""


def test_an_unwritable_path_is_reported(twin_mapper: Mapper) -> None:
    with pytest.raises(MapperError, match="cannot write bundle /sys/bundle: "):
        save(twin_mapper, "/sys/bundle")


def test_update_refuses_to_change_the_map(bundle: Path) -> None:
    with pytest.raises(MapperError, match="method would change the bundle's id"):
        update(bundle, method="identity")
    assert load_manifest(bundle).method == "ridge"


def test_different_maps_have_different_ids(twin_mapper: Mapper, sibling_mapper: Mapper, tmp_path: Path) -> None:
    changed = {name: tensor.clone() for name, tensor in twin_mapper.weights.items()}
    changed["layers.3.values.bias"][0] += 1
    mappers = (twin_mapper, sibling_mapper, seal(twin_mapper.manifest, changed))
    ids = {save(mapper, tmp_path / str(i)).bundle_id for i, mapper in enumerate(mappers)}
    assert len(ids) == 3
    assert save(twin_mapper, tmp_path / "again").bundle_id in ids


def test_check_accepts_only_the_models_of_the_fit(twin_mapper: Mapper) -> None:
    source, target = twin_mapper.manifest.source.fingerprint, twin_mapper.manifest.target.fingerprint
    twin_mapper.check(source, target)
    with pytest.raises(FingerprintMismatch, match=f"source twin .{source[:12]}.*not for weights {target[:12]}"):
        twin_mapper.check(target, target)
    with pytest.raises(FingerprintMismatch, match="target large"):
        twin_mapper.check(source, source)


def test_another_tokenizer_or_template_is_refused(twin_mapper: Mapper) -> None:
    card = twin_mapper.manifest.target.model_copy(update={"tokenizer_digest": "ab" * 32})
    mapper = seal(twin_mapper.manifest.model_copy(update={"target": card}), dict(twin_mapper.weights))
    mapper.check_tokenizers(source="cd" * 32, target="ab" * 32)  # the source's digest is unknown
    mapper.check_tokenizers(target=None)
    with pytest.raises(TokenizerMismatch, match="another tokenizer or chat template of target large .abababababab"):
        mapper.check_tokenizers(target="cd" * 32)


@pytest.mark.parametrize(
    ("evaluated", "gate", "bounds", "refusal"),
    [
        (None, None, {}, "has no evaluation"),
        (evaluation(arm="mapped"), None, {}, "has no evaluation"),
        (evaluation(1.25, 0.80), None, {}, None),
        (evaluation(1.26, 0.9), None, {}, "perplexity ratio 1.260 is over the gate's 1.25"),
        (evaluation(1.0, 0.79), None, {}, "top-1 agreement 0.790 is below the gate's 0.8"),
        (evaluation(1.5, 0.5), QualityGate(max_ppl_ratio=2, min_top1=0.4), {}, None),
        (
            evaluation(1.5, 0.5),
            QualityGate(max_ppl_ratio=2, min_top1=0.4),
            {"max_ppl_ratio": 1.2},
            "over the gate's 1.2",
        ),
        (evaluation(1.1, 0.9), None, {"min_top1": 0.95}, "below the gate's 0.95"),
        (evaluation(documents=4), None, {}, "evaluated on 4 documents at prefix length 384; the gate requires "),
        (evaluation(documents=4), QualityGate(min_documents=4), {}, None),
        (evaluation(documents=4), None, {"min_documents": 3}, None),
        (evaluation(documents=9), None, {"min_documents": 50}, "the gate requires 50"),
        (evaluation(lengths=(384, 1024)), None, {}, "evaluated on 0 documents at prefix length 2048"),
        (evaluation(lengths=(384, 1024)), QualityGate(lengths=(1024, 384)), {}, None),
        (
            evaluation(lengths=(80, 384, 1024, 2048)),
            None,
            {},
            "evaluated at prefix length 80; the gate requires at least 384",
        ),
        (evaluation(lengths=(384, 1024, 2048, 4096)), None, {}, None),
        (evaluation(scored=127), None, {}, "evaluated on 127 tokens after a prefix; the gate requires 128"),
        (evaluation(head=5), None, {}, "evaluated with head 5; the gate allows 4"),
        (evaluation(tail=200), None, {}, "evaluated with tail 200; the gate allows 64"),
        (evaluation(tail=8, head=0), None, {}, None),
    ],
)
def test_the_gate_checks_scores_and_protocol(
    twin_mapper: Mapper,
    evaluated: Evaluation | None,
    gate: QualityGate | None,
    bounds: dict[str, Any],
    refusal: str | None,
) -> None:
    manifest = twin_mapper.manifest.model_copy(update={"evaluation": evaluated, "gate": gate})
    mapper = Mapper(manifest, twin_mapper.weights)
    found = mapper.refusal(**bounds)
    assert found is None if refusal is None else refusal in (found or "")
