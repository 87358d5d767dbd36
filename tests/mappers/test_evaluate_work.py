"""Evaluation shares work between arms and lengths, and gives the same figures as separate runs."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from mappers import Evaluation, Mapper, QualityProtocol, evaluate, load
from mappers.arms import ARMS
from mappers.data import documents
from mappers.families import find_family
from mappers.models import load_model, load_tokenizer
from tests.mappers.pairs import evaluate_one, fit_with, random_documents

PROTOCOL = QualityProtocol(lengths=(40, 80), num_documents=4, head=4, tail=8, scored=16, num_controls=2)
TEST_DOCUMENTS = random_documents(6, 120, seed=42)


@pytest.fixture(scope="module")
def models(folders: dict[str, Path]) -> tuple[Any, Any]:
    return load_model(folders["sibling"]), load_model(folders["large"])


@pytest.mark.slow
def test_one_pass_for_all_lengths_gives_the_figures_of_separate_passes() -> None:
    """On the embedded trained models; the slow way prefills every prefix separately."""
    family = find_family("tiny")
    mapper, tokenizer = load(family.bundle), load_tokenizer(family.target)
    models = load_model(family.source), load_model(family.target)
    texts = list(islice((ids for ids in documents(family.conversations(), "test", tokenizer) if len(ids) > 300), 2))
    lengths = (80, 240)
    together = evaluate_one(mapper, *models, texts, QualityProtocol(lengths, 2, scored=32))
    assert [at.length for at in together.lengths] == list(lengths)
    for length, at in zip(lengths, together.lengths, strict=True):
        alone = evaluate_one(mapper, *models, texts, QualityProtocol((length,), 2, scored=32))
        for fast, slow in zip(at.arms, alone.arms, strict=True):
            assert (fast.arm, fast.documents) == (slow.arm, slow.documents)
            for figure in ("ppl_ratio", "top1", "kl_mean", "kl_p95"):
                assert getattr(fast, figure) == pytest.approx(getattr(slow, figure), rel=2e-4, abs=2e-5), fast.arm


def test_controls_use_fewer_documents_and_served_arms_use_all(sibling_mapper: Mapper, models: tuple[Any, Any]) -> None:
    few = evaluate_one(sibling_mapper, *models, TEST_DOCUMENTS, PROTOCOL)
    on_all = {"mapped", "hybrid", "source_alone"}
    assert {score.arm: score.documents for score in few.arms} == {arm: 4 if arm in on_all else 2 for arm in ARMS}
    every = evaluate_one(
        sibling_mapper, *models, TEST_DOCUMENTS, QualityProtocol((40, 80), 4, 4, 8, 16, num_controls=4)
    )
    for arm in on_all:
        assert few.arm(arm) == every.arm(arm)
    two = evaluate_one(sibling_mapper, *models, TEST_DOCUMENTS[:2], QualityProtocol((40, 80), 2, 4, 8, 16))
    assert few.arm("no_cache") == two.arm("no_cache")


def test_several_mappers_score_as_each_alone(
    sibling_mapper: Mapper, models: tuple[Any, Any], folders: dict[str, Path], documents: list[list[int]]
) -> None:
    plain = fit_with(folders["sibling"], folders["large"], documents, method="identity")
    results = evaluate([sibling_mapper, plain], *models, TEST_DOCUMENTS, PROTOCOL)
    together = [result.evaluation for result in results]
    assert together == [evaluate_one(mapper, *models, TEST_DOCUMENTS, PROTOCOL) for mapper in (sibling_mapper, plain)]
    assert together[0].arm("hybrid") != together[1].arm("hybrid")


class Killed(Exception):
    pass


def killed_after(num_documents: int) -> Any:
    seen = []

    def progress(done: int, total: int) -> None:
        seen.append(done)
        if len(seen) - 1 == num_documents:
            raise Killed

    return progress


def resumed(
    mapper: Mapper, models: tuple[Any, Any], file: Path, protocol: QualityProtocol = PROTOCOL
) -> tuple[Any, int]:
    """Return the evaluation resumed from a file, and the number of documents scored in this run."""
    progress: list[int] = []
    evaluation = evaluate_one(
        mapper,
        *models,
        TEST_DOCUMENTS,
        protocol,
        progress_file=file,
        progress=lambda done, total: progress.append(done),
    )
    return evaluation, len(progress[1:])  # progress is first reported before any document, which may take minutes


@pytest.fixture
def killed_file(sibling_mapper: Mapper, models: tuple[Any, Any], tmp_path: Path) -> Path:
    """Progress file of an evaluation of four documents that was killed after three."""
    file = tmp_path / "report.json.partial"
    with pytest.raises(Killed):
        evaluate_one(sibling_mapper, *models, TEST_DOCUMENTS, PROTOCOL, progress_file=file, progress=killed_after(3))
    return file


def test_a_killed_evaluation_resumes(sibling_mapper: Mapper, models: tuple[Any, Any], killed_file: Path) -> None:
    whole: Evaluation = evaluate_one(sibling_mapper, *models, TEST_DOCUMENTS, PROTOCOL)
    assert resumed(sibling_mapper, models, killed_file) == (whole, 1)
    assert resumed(sibling_mapper, models, killed_file) == (whole, 0), "the caller removes the file"


def test_a_truncated_line_is_scored_again(sibling_mapper: Mapper, models: tuple[Any, Any], killed_file: Path) -> None:
    killed_file.write_text(killed_file.read_text()[:-40])
    evaluation, num_scored = resumed(sibling_mapper, models, killed_file)
    assert num_scored == 2 and evaluation.arms[0].documents == 2


def test_scores_of_another_protocol_are_not_reused(
    sibling_mapper: Mapper, models: tuple[Any, Any], killed_file: Path
) -> None:
    other = QualityProtocol(lengths=(40, 80), num_documents=4, head=4, tail=9, scored=16, num_controls=2)
    evaluation, num_scored = resumed(sibling_mapper, models, killed_file, other)
    assert num_scored == 4 and evaluation == evaluate_one(sibling_mapper, *models, TEST_DOCUMENTS, other)
