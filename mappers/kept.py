"""Verdicts of an evaluation under way, on disk a document a line, so that one that was killed goes on where it was."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from mappers.protocol import Document
from mappers.scores import Score, Verdict, Watched

Judged = list[list[Verdict]]  # by mapper, by prefix length


class Kept:
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

    def __contains__(self, pair: tuple[Document, Document | None]) -> bool:
        return _digest(*pair) in self._known

    def of(self, document: Document, other: Document | None) -> Judged:
        return self._known[_digest(document, other)]

    def add(self, document: Document, other: Document | None, judged: Judged) -> None:
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


def _digest(document: Document, other: Document | None) -> str:
    told = [(each.index, each.ids, each.lengths, each.controls) for each in (document, other) if each]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()


def _line(digest: str, judged: Judged) -> str:
    rows = [[_told(verdict) for verdict in verdicts] for verdicts in judged]
    return json.dumps({"document": digest, "judged": rows}) + "\n"


def _told(verdict: Verdict) -> dict[str, Any]:
    watched = verdict.attention
    return {
        "scores": [{**vars(score), "kl": score.kl.tolist()} for score in verdict.scores],
        "attention": watched and {**vars(watched), "cosines": watched.cosines.tolist()},
        "greedy": verdict.greedy,
    }


def _judged(rows: list[list[dict[str, Any]]]) -> Judged:
    return [[_verdict(told) for told in verdicts] for verdicts in rows]


def _verdict(told: dict[str, Any]) -> Verdict:
    watched = told["attention"]
    scores = tuple(Score(**{**score, "kl": torch.tensor(score["kl"])}) for score in told["scores"])
    attention = watched and Watched(torch.tensor(watched["cosines"]), watched["by_distance"])
    return Verdict(scores, attention, told["greedy"])
