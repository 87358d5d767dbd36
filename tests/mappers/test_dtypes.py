"""Models are loaded in the requested precision; statistics of their caches are float32 and float64 in any case."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mappers import CheckpointMismatch, MapperError, QualityProtocol
from mappers.models import load_model, prefill
from tests.mappers.pairs import evaluate_one, fit_with, llama, random_documents, saved

PROTOCOL = QualityProtocol(lengths=(60,), num_documents=2, head=4, tail=8, scored=16)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_map_fitted_and_evaluated_in_half_precision_is_close_to_float32(
    folders: dict[str, Path], documents: list[list[int]], dtype: str
) -> None:
    twin, large = folders["twin"], folders["large"]
    mapper = fit_with(twin, large, documents, dtype=dtype, precision="float32", ridges=(1e-9,))
    assert mapper.manifest.options["dtype"] == dtype
    (ids,) = random_documents(1, 80, seed=3)
    exact, mapped = prefill(load_model(folders["large"]), ids), mapper.map(prefill(load_model(folders["twin"]), ids))
    for found, expected in zip(mapped.values, exact.values, strict=True):
        assert 1e-5 < float((found - expected).norm() / expected.norm()) < 0.02
    models = load_model(folders["twin"], dtype=dtype), load_model(folders["large"], dtype=dtype)
    assert {str(model.dtype) for model in models} == {f"torch.{dtype}"}
    evaluation = evaluate_one(mapper, *models, random_documents(2, 90, seed=4), PROTOCOL)
    for arm in ("native", "hybrid"):
        score = evaluation.arm(arm)
        assert score is not None and score.kl_mean < 0.02
    assert min(row.mean for row in evaluation.attention) > 0.995


def test_dtype_auto_is_that_of_the_stored_weights(tmp_path: Path) -> None:
    saved(llama(1, 1).bfloat16(), tmp_path / "half")
    assert load_model(tmp_path / "half", dtype="auto").dtype == torch.bfloat16
    assert load_model(tmp_path / "half").dtype == torch.float32
    with pytest.raises(MapperError, match="dtype is 'int8'; allowed: float32, bfloat16, float16, auto"):
        load_model(tmp_path / "half", dtype="int8")


def test_statistics_of_another_dtype_are_not_resumed(
    folders: dict[str, Path], documents: list[list[int]], tmp_path: Path
) -> None:
    given: dict[str, Any] = {
        "layers": 1,
        "checkpoint": tmp_path / "kept",
        "keep_checkpoint": True,
        "method": "identity",
    }
    assert "dtype" not in fit_with(folders["twin"], folders["large"], documents[:4], **given).manifest.options
    with pytest.raises(CheckpointMismatch, match="was written with dtype None, not 'bfloat16'"):
        fit_with(folders["twin"], folders["large"], documents[:4], dtype="bfloat16", **given)
