from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from benchmarks.peer_kvbridge import comparison_of, forward_clock, main, verdict
from mappers.scores import DocumentScore, paired
from tests.mappers.pairs import llama


def test_other_folder_is_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 1
    assert f"{tmp_path} is not a checkout of kvbridge" in capsys.readouterr().err


def scores(losses: dict[tuple[int, int], float], arm: str = "hybrid") -> list[DocumentScore]:
    return [
        DocumentScore(arm, document, length, loss, top1=1.0, kl=torch.zeros(1))
        for (document, length), loss in losses.items()
    ]


THEIRS = {(document, length): document / 3 + length / 1000 for document in range(5) for length in (384, 1024)}


@pytest.mark.parametrize(
    ("added", "ratio", "better"), [(-0.01, 0.99, "kvrelay"), (0.02, 1.02, "kvbridge"), (0.0, 1.0, None)]
)
def test_comparison_is_paired_by_document(added: float, ratio: float, better: str | None) -> None:
    """A common difference shows despite large differences between documents. Other arms are ignored."""
    ours = {key: loss + added + 1e-3 * (-1) ** key[0] for key, loss in THEIRS.items()}
    comparison = comparison_of(paired("hybrid", scores(ours) + scores(THEIRS, "mapped"), scores(THEIRS)))
    assert comparison["ratio"] == pytest.approx(ratio, abs=0.001) and comparison["better"] == better
    assert comparison["low"] < comparison["ratio"] < comparison["high"] < comparison["low"] + 0.003
    assert [(row["document"], row["length"]) for row in comparison["by_document"]] == list(THEIRS)
    assert (f"{better} is better" if better else "a tie") in verdict(comparison)


def test_single_document_is_a_tie() -> None:
    alone = {(0, 384): 0.1, (0, 1024): 0.1}
    assert comparison_of(paired("hybrid", scores(alone), scores(dict.fromkeys(alone, 0.2))))["better"] is None


def test_forward_clock_counts_nested_passes_once() -> None:
    model, ids = llama(1, 2), torch.tensor([[1, 2, 3]])
    began = time.perf_counter()
    with forward_clock() as clock:
        torch.nn.Linear(2, 2)(torch.zeros(1, 2))
        assert clock.seconds == 0
        model(ids)
    whole = time.perf_counter() - began
    assert 0 < clock.seconds < whole
    counted = clock.seconds
    model(ids)
    assert clock.seconds == counted
