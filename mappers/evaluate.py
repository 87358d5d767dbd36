"""Evaluates mappers by what the target model predicts over their caches, on the protocol of `mappers.protocol`."""

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
from mappers.protocol import EvalDocument, QualityProtocol, choose_documents, estimated_tokens, other_documents
from mappers.scores import (
    AttentionScores,
    DocumentScore,
    PrefixScores,
    summarise,
    summarise_attention,
    summarise_distances,
    summarise_greedy,
)

Progress = Callable[[int, int], None]  # tokens done, tokens in total; estimated
ScoresByMapper = list[list[PrefixScores]]  # by mapper, then by prefix length


@dataclass(frozen=True)
class EvaluationResult:
    """All scores of one mapper; `evaluation` summarises them."""

    prefixes: list[PrefixScores]
    documents: list[EvalDocument]
    protocol: QualityProtocol
    arms: Sequence[str]
    data: str

    @property
    def scores(self) -> list[DocumentScore]:
        return [score for prefix in self.prefixes for score in prefix.scores]

    @property
    def evaluation(self) -> Evaluation:
        scores, protocol = self.scores, self.protocol
        return Evaluation(
            data=self.data,
            head=protocol.head,
            tail=protocol.tail,
            scored=protocol.scored,
            tokens=protocol.scored * sum(len(document.lengths) for document in self.documents),
            arms=summarise(scores, self.arms),
            lengths=tuple(
                LengthScores(
                    length=length,
                    num_documents=sum(length in document.lengths for document in self.documents),
                    arms=summarise((score for score in scores if score.length == length), self.arms),
                )
                for length in protocol.lengths
            ),
            attention=summarise_attention(self.prefixes),
            by_distance=summarise_distances(self.prefixes),
            greedy=summarise_greedy(self.prefixes, protocol.greedy),
        )


@torch.no_grad()
def evaluate(
    mappers: Sequence[Mapper],
    source_model: Any,
    target_model: Any,
    documents: Iterable[Sequence[int]],
    protocol: QualityProtocol | None = None,
    *,
    arms: Sequence[str] = ARMS,
    data: str = "unnamed",
    progress: Progress | None = None,
    progress_file: Path | None = None,
) -> list[EvaluationResult]:
    """Run the protocol on the first documents that are long enough, for mappers between the same two models.

    With a `progress_file`, a second call resumes where the first was killed. The caller removes the file. Raises
    `MapperError` without a mapper or a long enough document.
    """
    # 1. Check the arguments.
    protocol = protocol or QualityProtocol()
    check_arms(arms)
    if not mappers:
        raise MapperError("no mapper to evaluate; at least 1 is needed")
    for mapper in mappers[1:]:
        mapper.check(mappers[0].manifest.source.fingerprint, mappers[0].manifest.target.fingerprint)
    protocol.check_context(source_model, target_model)
    # 2. Each document is paired with the one its arm `wrong_document` is mapped from.
    chosen = choose_documents(documents, protocol)
    pairs = list(zip(chosen, other_documents(chosen), strict=True))
    # 3. Score the documents that the progress file does not contain.
    key = {"bundles": [mapper.bundle_id for mapper in mappers], "protocol": vars(protocol), "arms": list(arms)}
    key["dtypes"] = [str(model.dtype) for model in (source_model, target_model)]
    done = ScoreFile(progress_file, key)
    examiner = Examiner(mappers, source_model, target_model, protocol, arms)
    remaining = [pair for pair in pairs if pair not in done]
    work = [estimated_tokens(document, protocol, len(mappers)) for document, _ in remaining]
    progress = progress or (lambda done, total: None)
    if remaining:
        progress(0, sum(work))
    for num_done, pair in enumerate(remaining, start=1):
        done.add(*pair, examiner.score(*pair))
        progress(sum(work[:num_done]), sum(work))
    # 4. Collect by mapper.
    by_mapper = [
        [prefix for prefixes in each for prefix in prefixes]
        for each in zip(*(done.of(*pair) for pair in pairs), strict=True)
    ]
    return [EvaluationResult(prefixes, chosen, protocol, arms, data) for prefixes in by_mapper]


class ScoreFile:
    """Scores of an evaluation in progress, in memory and one document per line in a file, so that it can resume.

    `key` identifies everything else that the scores depend on; a file with another key is started over. An incomplete
    last line is dropped. Without a `path` nothing is written.
    """

    def __init__(self, path: Path | None, key: Mapping[str, Any]):
        self._path, key = path, json.loads(json.dumps(key))
        self._scores: dict[str, ScoresByMapper] = {}  # by digest of the document pair
        lines = _json_lines(path)
        if lines and lines[0] == key:
            self._scores = {line["document"]: _decode(line["judged"]) for line in lines[1:]}
        if self._path:
            kept = [_encode(document, scores) for document, scores in self._scores.items()]
            self._path.write_text(json.dumps(key) + "\n" + "".join(kept))

    def __contains__(self, pair: tuple[EvalDocument, EvalDocument | None]) -> bool:
        return _digest(*pair) in self._scores

    def of(self, document: EvalDocument, other: EvalDocument | None) -> ScoresByMapper:
        return self._scores[_digest(document, other)]

    def add(self, document: EvalDocument, other: EvalDocument | None, scores: ScoresByMapper) -> None:
        self._scores[_digest(document, other)] = scores
        if self._path:
            with self._path.open("a") as file:
                file.write(_encode(_digest(document, other), scores))


def _json_lines(path: Path | None) -> list[Any]:
    """Parse the lines up to the first invalid one."""
    lines = []
    for line in path.read_text(errors="replace").splitlines() if path and path.exists() else ():
        try:
            lines.append(json.loads(line))
        except ValueError:
            break
    return lines


def _digest(document: EvalDocument, other: EvalDocument | None) -> str:
    values = [(each.index, each.ids, each.lengths, each.controls) for each in (document, other) if each]
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


def _encode(digest: str, scores: ScoresByMapper) -> str:
    def encode(prefix: PrefixScores) -> dict[str, Any]:
        attention = prefix.attention
        return {
            "scores": [{**vars(score), "kl": score.kl.tolist()} for score in prefix.scores],
            "attention": attention and {**vars(attention), "cosines": attention.cosines.tolist()},
            "greedy": prefix.greedy,
        }

    rows = [[encode(prefix) for prefix in prefixes] for prefixes in scores]
    return json.dumps({"document": digest, "judged": rows}) + "\n"


def _decode(rows: list[list[dict[str, Any]]]) -> ScoresByMapper:
    def decode(values: dict[str, Any]) -> PrefixScores:
        attention = values["attention"]
        scores = tuple(DocumentScore(**{**score, "kl": torch.tensor(score["kl"])}) for score in values["scores"])
        cosines = attention and AttentionScores(torch.tensor(attention["cosines"]), attention["by_distance"])
        return PrefixScores(scores, cosines, values["greedy"])

    return [[decode(values) for values in prefixes] for prefixes in rows]
