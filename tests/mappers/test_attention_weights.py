from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mappers import CalibrationTooSmall, MapperError
from mappers.attention import AttentionCall, AttentionReceived, shrink_weights, watch_attention
from mappers.models import prefill
from tests.mappers.pairs import fit_with, largest_difference, llama, random_documents

(DOCUMENT,) = random_documents(1, 40)


def test_attention_received_matches_the_model_output() -> None:
    """Prefill in two chunks; compare with the weights that the model's eager attention returns."""
    eager = llama(1, 3, attn_implementation="eager")
    attentions = torch.stack(eager(torch.tensor([DOCUMENT]), output_attentions=True).attentions)[:, 0].double()
    paid = attentions.mean((0, 1)) * torch.arange(1, 41)[:, None]  # relative to uniform attention
    expected = [float(paid[i + 1 :, i].mean()) for i in range(39)]
    model, received = llama(1, 3), AttentionReceived(40)
    with watch_attention(model, received):
        prefill(model, DOCUMENT[25:], prefill(model, DOCUMENT[:25]))
    torch.testing.assert_close(received.mean()[:39], torch.tensor(expected, dtype=torch.float64), rtol=1e-4, atol=1e-5)
    assert received.mean()[39] == 1  # no token attends to the last one


def test_watching_does_not_change_the_model() -> None:
    model = llama(1, 3)
    alone, heard = prefill(model, DOCUMENT), list[AttentionCall]()
    with watch_attention(model, heard.append):
        assert largest_difference(prefill(model, DOCUMENT), alone) == 0
        assert largest_difference(prefill(model, DOCUMENT[20:], alone.slice(0, 20)), alone) < 1e-4
    assert [attending.layer for attending in heard] == [0, 1, 2] * 2
    prefill(model, DOCUMENT)
    assert len(heard) == 6 and model.config._attn_implementation == "sdpa"


def test_uniform_attention_gives_equal_weights() -> None:
    received = AttentionReceived(6)
    causal = torch.ones(6, 6, dtype=torch.bool).tril()
    received(AttentionCall(0, torch.zeros(2, 6, 4), torch.zeros(1, 6, 4), torch.zeros(1, 6, 4), causal, 1.0))
    torch.testing.assert_close(received.mean(), torch.ones(6, dtype=torch.float64))


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9, 1.0])
def test_weights_are_shrunk_exactly_to_the_effective_share(share: float) -> None:
    raw = torch.rand(100, generator=torch.Generator().manual_seed(0), dtype=torch.float64) ** 8
    weights = shrink_weights(raw, share)
    effective = float(weights.sum() ** 2 / weights.square().sum()) / 100
    assert weights.mean() == pytest.approx(1) and weights.min() > 0
    assert effective == pytest.approx(max(share, 0.2), abs=0.05) and effective >= share - 1e-9
    assert torch.equal(weights.argsort(), raw.argsort()) or share == 1.0
    mild = 1 + raw / 100
    torch.testing.assert_close(shrink_weights(mild, 0.5), mild / mild.mean())


def test_weighting_changes_the_map(folders: dict[str, Path], documents: list[list[int]]) -> None:
    even = fit_with(folders["other"], folders["large"], documents, layers=1)
    weighted = fit_with(
        folders["other"], folders["large"], documents, layers=1, weighting="attention", effective_share=0.8
    )
    assert weighted.bundle_id != even.bundle_id
    assert weighted.manifest.options["weighting"] == "attention"
    assert weighted.manifest.options["effective_share"] == 0.8
    again = fit_with(
        folders["other"], folders["large"], documents, layers=1, weighting="attention", effective_share=1.0
    )
    for name, weight in even.weights.items():
        torch.testing.assert_close(again.weights[name], weight)


def test_unequal_weights_count_as_fewer_tokens(folders: dict[str, Path]) -> None:
    """8 of 9 documents are for training, with 128 tokens after their heads; 126 are needed."""
    given: dict[str, Any] = {"layers": 1, "weighting": "attention", "tokens_per_feature": 7.9}
    fit_with(folders["other"], folders["large"], random_documents(9, 20), effective_share=1.0, **given)
    with pytest.raises(CalibrationTooSmall, match="tokens for 16 features; at least 126 are needed"):
        fit_with(folders["other"], folders["large"], random_documents(9, 20), effective_share=0.1, **given)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"weighting": "even"}, "weighting is 'even'; allowed: uniform, attention"),
        ({"effective_share": 0.0}, "effective_share is 0.0; allowed: above 0, up to 1"),
        ({"effective_share": 1.5}, "effective_share is 1.5"),
    ],
)
def test_invalid_weightings_are_refused(
    folders: dict[str, Path], documents: list[list[int]], settings: dict[str, object], message: str
) -> None:
    with pytest.raises(MapperError, match=message):
        fit_with(folders["twin"], folders["large"], documents, **settings)
