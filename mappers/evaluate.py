"""Judges mappers by what the target model predicts on their caches, on the fixed protocol (`mappers.protocol`)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mappers.arms import ARMS, Examiner, check_arms
from mappers.errors import MapperError
from mappers.manifest import Evaluation, LengthScores
from mappers.mapper import Mapper
from mappers.protocol import EvalDocument, QualityProtocol, choose_documents, others, tokens_read
from mappers.scores import (
    AttentionScores,
    DocumentScore,
    PrefixScores,
    attention_of,
    distances_of,
    greedy_of,
    summarise,
)

Progress = Callable[[int, int], None]  # tokens read so far, tokens to read in all; estimated


def evaluate(
    mapper: Mapper,
    source_model: Any,
    target_model: Any,
    documents: Iterable[Sequence[int]],
    protocol: QualityProtocol | None = None,
    **options: Any,
) -> Evaluation:
    """What `evaluate_all` gives for one mapper."""
    return evaluate_all([mapper], source_model, target_model, documents, protocol, **options)[0]


def evaluate_all(
    mappers: Sequence[Mapper],
    source_model: Any,
    target_model: Any,
    documents: Iterable[Sequence[int]],
    protocol: QualityProtocol | None = None,
    **options: Any,
) -> list[Evaluation]:
    """What `judge_all` tells of each mapper, summed up."""
    judged = judge_all(mappers, source_model, target_model, documents, protocol, **options)
    return [each.evaluation for each in judged]


@dataclass(frozen=True)
class EvaluationResult:
    """All that one mapper scored, and on what."""

    verdicts: list[PrefixScores]
    chosen: list[EvalDocument]
    protocol: QualityProtocol
    arms: Sequence[str]
    data: str

    @property
    def scores(self) -> list[DocumentScore]:
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
    protocol: QualityProtocol | None = None,
    *,
    arms: Sequence[str] = ARMS,
    data: str = "unnamed",
    progress: Progress | None = None,
    keep: Path | None = None,
) -> list[EvaluationResult]:
    """Run the protocol over the first documents that are long enough, for mappers of the same two models at once.

    With a file to `keep` verdicts in, a second call goes on where a killed one was; it is the caller's to remove.
    Raises `MapperError` if there is nothing to judge, or no document to judge it on.
    """
    protocol = protocol or QualityProtocol()
    _check(mappers, arms)
    protocol.check_context(source_model, target_model)
    chosen = choose_documents(documents, protocol)
    key = {"bundles": [mapper.bundle_id for mapper in mappers], "protocol": vars(protocol), "arms": list(arms)}
    key["dtypes"] = [str(model.dtype) for model in (source_model, target_model)]
    kept = VerdictFile(keep, key)
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
    return [EvaluationResult(verdicts, chosen, protocol, arms, data) for verdicts in by_mapper]


def _at_length(
    length: int, chosen: list[EvalDocument], scores: list[DocumentScore], arms: Sequence[str]
) -> LengthScores:
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


Judged = list[list[PrefixScores]]  # by mapper, by prefix length


class VerdictFile:
    """What is known already, by document; `path` is None where nothing is to be kept.

    `key` names all that the figures depend on but the documents. A file with another key is begun anew, a last line
    that was cut short is left out.
    """

    def __init__(self, path: Path | None, key: Mapping[str, Any]):
        self._path, self._key = path, json.loads(json.dumps(key))
        self._known: dict[str, Judged] = {}
        lines = _lines(path)
        if lines and lines[0] == self._key:
            self._known = {line["document"]: _judged(line["judged"]) for line in lines[1:]}
        self._write_all()

    def __contains__(self, pair: tuple[EvalDocument, EvalDocument | None]) -> bool:
        return _digest(*pair) in self._known

    def of(self, document: EvalDocument, other: EvalDocument | None) -> Judged:
        return self._known[_digest(document, other)]

    def add(self, document: EvalDocument, other: EvalDocument | None, judged: Judged) -> None:
        self._known[_digest(document, other)] = judged
        if self._path:
            with self._path.open("a") as file:
                file.write(_line(_digest(document, other), judged))

    def _write_all(self) -> None:
        if self._path:
            lines = [_line(document, judged) for document, judged in self._known.items()]
            self._path.write_text(json.dumps(self._key) + "\n" + "".join(lines))


def _lines(path: Path | None) -> list[Any]:
    lines = []
    for line in path.read_text(errors="replace").splitlines() if path and path.exists() else ():
        try:
            lines.append(json.loads(line))
        except ValueError:
            break
    return lines


def _digest(document: EvalDocument, other: EvalDocument | None) -> str:
    told = [(each.index, each.ids, each.lengths, each.controls) for each in (document, other) if each]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()


def _line(digest: str, judged: Judged) -> str:
    rows = [[_told(verdict) for verdict in verdicts] for verdicts in judged]
    return json.dumps({"document": digest, "judged": rows}) + "\n"


def _told(verdict: PrefixScores) -> dict[str, Any]:
    watched = verdict.attention
    return {
        "scores": [{**vars(score), "kl": score.kl.tolist()} for score in verdict.scores],
        "attention": watched and {**vars(watched), "cosines": watched.cosines.tolist()},
        "greedy": verdict.greedy,
    }


def _judged(rows: list[list[dict[str, Any]]]) -> Judged:
    return [[_verdict(told) for told in verdicts] for verdicts in rows]


def _verdict(told: dict[str, Any]) -> PrefixScores:
    watched = told["attention"]
    scores = tuple(DocumentScore(**{**score, "kl": torch.tensor(score["kl"])}) for score in told["scores"])
    attention = watched and AttentionScores(torch.tensor(watched["cosines"]), watched["by_distance"])
    return PrefixScores(scores, attention, told["greedy"])
