from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from mappers import Evaluation, Mapper, MapperError, QualityProtocol
from mappers.arms import ARMS, randomise
from mappers.models import load_model, log_probs, prefill, run
from mappers.protocol import choose_documents
from mappers.scores import compare, summarise
from tests.mappers.pairs import evaluate_one, fit_with, largest_difference, random_cache, random_documents

PROTOCOL = QualityProtocol(lengths=(40, 80), num_documents=4, head=4, tail=8, scored=16)
TEST_DOCUMENTS = random_documents(6, 120, seed=42)


@pytest.fixture(scope="module")
def exact(twin_mapper: Mapper, folders: dict[str, Path]) -> Evaluation:
    """Evaluation of an exact map."""
    models = load_model(folders["twin"]), load_model(folders["large"])
    return evaluate_one(twin_mapper, *models, TEST_DOCUMENTS, PROTOCOL, data="noise")


def row(evaluation: Evaluation, arm: str) -> Any:
    found = evaluation.arm(arm)
    assert found is not None
    return found


def test_all_arms_are_reported_in_order(exact: Evaluation) -> None:
    assert tuple(score.arm for score in exact.arms) == ARMS
    assert [(at.length, at.num_documents) for at in exact.lengths] == [(40, 4), (80, 4)]
    assert all(tuple(score.arm for score in at.arms) == ARMS for at in exact.lengths)
    assert exact.tokens == 2 * 4 * 16


@pytest.mark.parametrize(("arm", "tolerance"), [("native", 1e-4), ("mapped", 0.02), ("hybrid", 0.02)])
def test_an_exact_map_loses_nothing(exact: Evaluation, arm: str, tolerance: float) -> None:
    score = row(exact, arm)
    assert score.ppl_ratio == pytest.approx(1, abs=tolerance)
    assert score.kl_mean < tolerance and score.top1 > 0.97


def test_the_twin_predicts_like_the_large_model(exact: Evaluation) -> None:
    assert row(exact, "source_alone").kl_mean < 1e-3


@pytest.mark.parametrize("control", ["wrong_document", "random_mapper", "raw_source", "no_cache"])
def test_every_control_is_worse_than_the_map(exact: Evaluation, control: str) -> None:
    for rows in (exact.arms, *(at.arms for at in exact.lengths)):
        scores = {score.arm: score for score in rows}
        assert scores[control].kl_mean > 20 * scores["hybrid"].kl_mean
        assert scores[control].top1 < scores["hybrid"].top1


def test_each_arm_is_what_its_name_says(sibling_mapper: Mapper, folders: dict[str, Path]) -> None:
    """Recompute the arms from their definitions for one document; the wrong document is the other one."""
    source, target = load_model(folders["sibling"]), load_model(folders["large"])
    protocol = QualityProtocol(lengths=(60,), num_documents=2, head=4, tail=8, scored=16)
    documents = random_documents(2, 100, seed=9)
    found = evaluate_one(sibling_mapper, source, target, documents, protocol)
    ids, truth = documents[0], torch.tensor(documents[0][60:76])
    native = log_probs(target, run(target, ids[:75])[1][59:])
    head = prefill(target, ids[:4])

    def served(cache: Any, cut: int) -> Any:
        past = type(head).concatenate([head, cache.slice(4, cut)])
        return log_probs(target, run(target, ids[cut:75], past)[1][-16:])

    mapped = sibling_mapper.map(prefill(source, ids[:75]))
    expected = {
        "mapped": served(mapped, 59),
        "hybrid": served(mapped, 52),
        "wrong_document": served(sibling_mapper.map(prefill(source, documents[1][:75])), 52),
        "random_mapper": served(randomise(sibling_mapper).map(prefill(source, ids[:75])), 52),
        "no_cache": log_probs(target, run(target, ids[52:75], head, start=52)[1][-16:]),
        "source_alone": log_probs(source, run(source, ids[:75])[1][59:]),
    }
    alone = evaluate_one(sibling_mapper, source, target, documents, QualityProtocol((60,), 1, 4, 8, 16))
    assert alone.arm("wrong_document") is None
    for arm, predicted in expected.items():
        score = compare(arm, 0, 60, native, predicted, truth)
        if arm == "wrong_document":
            (pair,) = [s for s in found.arms if s.arm == arm]
            assert pair.kl_mean > 0
        else:
            assert row(alone, arm).kl_mean == pytest.approx(float(score.kl.mean()), rel=1e-3, abs=1e-6)
            assert row(alone, arm).ppl_ratio == pytest.approx(math.exp(score.log_ratio), rel=1e-3)


def test_a_native_tail_helps(sibling_mapper: Mapper, folders: dict[str, Path]) -> None:
    models = load_model(folders["sibling"]), load_model(folders["large"])
    found = evaluate_one(sibling_mapper, *models, TEST_DOCUMENTS, PROTOCOL, arms=("mapped", "hybrid"))
    assert [score.arm for score in found.arms] == ["mapped", "hybrid"]
    assert row(found, "hybrid").kl_mean < row(found, "mapped").kl_mean


def test_raw_source_is_skipped_if_heads_differ_in_size(documents: list[list[int]], tmp_path: Path) -> None:
    from tests.mappers.pairs import llama, saved

    source, target = llama(5, 2, head_dim=4), llama(6, 3)
    mapper = fit_with(saved(source, tmp_path / "a"), saved(target, tmp_path / "b"), documents, layers=1)
    found = evaluate_one(mapper, source, target, TEST_DOCUMENTS[:2], PROTOCOL)
    assert {score.arm for score in found.arms} == set(ARMS) - {"raw_source"}


def test_ratios_are_paired_by_document_and_averaged_over_lengths() -> None:
    torch.manual_seed(0)
    native = torch.randn(5, 7).log_softmax(-1)
    truth = torch.randint(7, (5,))
    scores = []
    for document, length, shift in ((0, 10, 0.2), (1, 10, 0.4), (0, 20, 0.8)):
        worse = native.clone()
        worse[torch.arange(5), truth] -= shift
        scores.append(compare("hybrid", document, length, native, worse, truth))
    (overall,) = summarise(scores, ["hybrid", "mapped"])
    assert overall.ppl_ratio == pytest.approx(math.exp((0.3 + 0.8) / 2), rel=1e-4)
    assert overall.ppl_low <= overall.ppl_ratio <= overall.ppl_high


def test_the_interval_covers_the_variation_of_documents() -> None:
    native = torch.zeros(4, 3).log_softmax(-1)
    truth = torch.zeros(4, dtype=torch.long)
    scores = []
    for document in range(40):
        worse = native.clone()
        worse[:, 0] -= 0.1 if document % 2 else 0.3
        scores.append(compare("hybrid", document, 10, native, worse, truth))
    (score,) = summarise(scores, ["hybrid"])
    # 40 draws with standard deviation 0.1: +- 1.96 * 0.1 / sqrt(40) = 0.031
    assert math.log(score.ppl_high) - 0.2 == pytest.approx(0.031, abs=0.006)
    assert 0.2 - math.log(score.ppl_low) == pytest.approx(0.031, abs=0.006)


def test_equal_predictions_score_perfectly_and_shifted_ones_do_not() -> None:
    torch.manual_seed(0)
    native, truth = torch.randn(6, 9).log_softmax(-1), torch.randint(9, (6,))
    same, moved = compare("a", 0, 1, native, native, truth), compare("a", 0, 1, native, native.roll(1, -1), truth)
    assert (same.log_ratio, same.top1, float(same.kl.abs().max())) == (0, 1, 0)
    assert moved.top1 == 0 and float(moved.kl.min()) > 0


def test_zeroing_the_cache_changes_the_predictions(folders: dict[str, Path]) -> None:
    model, ids = load_model(folders["large"]), TEST_DOCUMENTS[0]
    past = prefill(model, ids[:60])
    zero = type(past)(tuple(k * 0 for k in past.keys), tuple(v * 0 for v in past.values))
    native, moved = (log_probs(model, run(model, ids[60:70], cache)[1]) for cache in (past, zero))
    assert (native - moved).abs().max() > 0.1


def test_random_weights_have_the_same_magnitude_and_are_seeded(sibling_mapper: Mapper) -> None:
    cache = random_cache(3, 60)
    one, two = randomise(sibling_mapper), randomise(sibling_mapper)
    assert one.manifest.copied_layers == () and largest_difference(one.map(cache), two.map(cache)) == 0
    fitted, drawn = sibling_mapper.map(cache), one.map(cache)
    for layer in range(4):
        assert 0.3 < float(drawn.values[layer].norm() / fitted.values[layer].norm()) < 3
    assert largest_difference(fitted, drawn) > 1


def test_no_more_documents_are_read_than_needed() -> None:
    read_so_far: list[int] = []

    def stream() -> Any:
        for i, length in enumerate([30, 200, 90, 70, 500, 100]):
            read_so_far.append(i)
            yield list(range(length))

    chosen = choose_documents(stream(), QualityProtocol(lengths=(40, 80), num_documents=2, head=4, tail=8, scored=16))
    assert read_so_far == [0, 1, 2, 3, 4]
    assert [(d.index, len(d.ids), d.lengths) for d in chosen] == [(1, 96, (40, 80)), (4, 96, (80,)), (2, 56, (40,))]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lengths": ()}, "each must exceed"),
        ({"lengths": (12,)}, r"must exceed head \+ tail = 12"),
        ({"tail": 0}, "tail is 0; allowed: 1 or more"),
        ({"head": -1}, "head is -1; allowed: 0 or more"),
        ({"num_documents": 0}, "num_documents is 0"),
    ],
)
def test_an_inconsistent_protocol_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(MapperError, match=message):
        QualityProtocol(**{"lengths": (40,), "head": 4, "tail": 8, "scored": 16, **change})


@pytest.mark.parametrize(
    ("lengths", "arms", "message"),
    [
        ((40, 300), ARMS, "no document of 316 tokens for prefix length 300; the longest has 120"),
        ((500,), ARMS, "516 tokens exceed the context of 512"),
        ((40,), ("hybird",), "unknown arm 'hybird'; known: native"),
    ],
)
def test_an_impossible_evaluation_is_refused(
    twin_mapper: Mapper, folders: dict[str, Path], lengths: tuple[int, ...], arms: tuple[str, ...], message: str
) -> None:
    models = load_model(folders["twin"]), load_model(folders["large"])
    protocol = QualityProtocol(lengths=lengths, num_documents=1, head=4, tail=8, scored=16)
    with pytest.raises(MapperError, match=message):
        evaluate_one(twin_mapper, *models, TEST_DOCUMENTS, protocol, arms=arms)
