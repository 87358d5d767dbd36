"""Judges mappers by what the target model predicts on their caches, on the fixed protocol (`mappers.protocol`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mappers.arms import ARMS, check_arms
from mappers.errors import MapperError
from mappers.examine import Examiner
from mappers.kept import Kept
from mappers.manifest import Evaluation, LengthScores
from mappers.mapper import Mapper
from mappers.protocol import Document, Protocol, choose_documents, others, tokens_read
from mappers.scores import Score, Verdict, attention_of, distances_of, greedy_of, summarise

Progress = Callable[[int, int], None]  # tokens read so far, tokens to read in all; estimated


def evaluate(
    mapper: Mapper,
    source_model: Any,
    target_model: Any,
    documents: Iterable[Sequence[int]],
    protocol: Protocol | None = None,
    **options: Any,
) -> Evaluation:
    """What `evaluate_all` gives for one mapper."""
    return evaluate_all([mapper], source_model, target_model, documents, protocol, **options)[0]


def evaluate_all(
    mappers: Sequence[Mapper],
    source_model: Any,
    target_model: Any,
    documents: Iterable[Sequence[int]],
    protocol: Protocol | None = None,
    **options: Any,
) -> list[Evaluation]:
    """What `judge_all` tells of each mapper, summed up."""
    judged = judge_all(mappers, source_model, target_model, documents, protocol, **options)
    return [each.evaluation for each in judged]


@dataclass(frozen=True)
class Judgement:
    """All that one mapper scored, and on what."""

    verdicts: list[Verdict]
    chosen: list[Document]
    protocol: Protocol
    arms: Sequence[str]
    data: str

    @property
    def scores(self) -> list[Score]:
        return [score for verdict in self.verdicts for score in verdict.scores]

    @property
    def evaluation(self) -> Evaluation:
        scores, protocol = self.scores, self.protocol
        return Evaluation(
            data=self.data,
            head=protocol.head,
            tail=protocol.tail,
            scored=protocol.scored,
            tokens=protocol.scored * sum(len(document.lengths) for document in self.chosen),
            arms=summarise(scores, self.arms),
            lengths=tuple(_at_length(length, self.chosen, scores, self.arms) for length in protocol.lengths),
            attention=attention_of(self.verdicts),
            by_distance=distances_of(self.verdicts),
            greedy=greedy_of(self.verdicts, protocol.greedy),
        )


@torch.no_grad()
def judge_all(
    mappers: Sequence[Mapper],
    source_model: Any,
    target_model: Any,
    documents: Iterable[Sequence[int]],
    protocol: Protocol | None = None,
    *,
    arms: Sequence[str] = ARMS,
    data: str = "unnamed",
    progress: Progress | None = None,
    keep: Path | None = None,
) -> list[Judgement]:
    """Run the protocol over the first documents that are long enough, for mappers of the same two models at once.

    With a file to `keep` verdicts in, a second call goes on where a killed one was; it is the caller's to remove.
    Raises `MapperError` if there is nothing to judge, or no document to judge it on.
    """
    protocol = protocol or Protocol()
    _check(mappers, arms)
    protocol.check_context(source_model, target_model)
    chosen = choose_documents(documents, protocol)
    key = {"bundles": [mapper.bundle_id for mapper in mappers], "protocol": vars(protocol), "arms": list(arms)}
    key["dtypes"] = [str(model.dtype) for model in (source_model, target_model)]
    kept = Kept(keep, key)
    examiner = Examiner(mappers, source_model, target_model, protocol, arms)
    pairs = list(zip(chosen, others(chosen), strict=True))
    to_do = [pair for pair in pairs if pair not in kept]
    work = [tokens_read(document, protocol, len(mappers)) for document, _ in to_do]
    progress = progress or (lambda done, total: None)
    if to_do:
        progress(0, sum(work))
    for done, pair in enumerate(to_do, start=1):
        kept.add(*pair, examiner.verdicts(*pair))
        progress(sum(work[:done]), sum(work))
    by_mapper = [
        [verdict for verdicts in each for verdict in verdicts]
        for each in zip(*(kept.of(*pair) for pair in pairs), strict=True)
    ]
    return [Judgement(verdicts, chosen, protocol, arms, data) for verdicts in by_mapper]


def _at_length(length: int, chosen: list[Document], scores: list[Score], arms: Sequence[str]) -> LengthScores:
    return LengthScores(
        length=length,
        num_documents=sum(length in document.lengths for document in chosen),
        arms=summarise((score for score in scores if score.length == length), arms),
    )


def _check(mappers: Sequence[Mapper], arms: Sequence[str]) -> None:
    check_arms(arms)
    if not mappers:
        raise MapperError("no mapper to judge; at least 1 is needed")
    for mapper in mappers[1:]:
        mapper.check(mappers[0].manifest.source.fingerprint, mappers[0].manifest.target.fingerprint)
