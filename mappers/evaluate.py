"""Judges a mapper by what the target model predicts on its caches, on the fixed protocol.

For each document and prefix length L the target predicts the next `scored` tokens teacher-forced:

    0      head                 L - tail        L              L + scored
    |native|       mapped       |  read natively, over the map  |
                                                ^ scored from here
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mappers.arms import ARMS, CACHE_ARMS, Caches, randomised, raw
from mappers.cache import KVCache
from mappers.errors import MapperError
from mappers.manifest import Evaluation, LengthScores
from mappers.mapper import Mapper
from mappers.models import log_probs, run
from mappers.scores import Score, compare, summarise

LENGTHS = (384, 1024, 2048)
NUM_DOCUMENTS = 50
HEAD, TAIL, SCORED = 4, 64, 128

Progress = Callable[[int, int], None]  # documents done, documents to do


@dataclass(frozen=True)
class Protocol:
    """Which prefixes are judged, and how. `num_documents` is wanted for each length."""

    lengths: tuple[int, ...] = LENGTHS
    num_documents: int = NUM_DOCUMENTS
    head: int = HEAD
    tail: int = TAIL
    scored: int = SCORED

    def __post_init__(self) -> None:
        if self.head < 0 or self.tail < 1 or self.scored < 1 or self.num_documents < 1:
            raise MapperError(f"{self}: allowed are head >= 0; tail, scored and num_documents >= 1")
        if not self.lengths or min(self.lengths) <= self.head + self.tail:
            raise MapperError(f"lengths {self.lengths}: each must exceed head + tail = {self.head + self.tail}")


@dataclass(frozen=True)
class Document:
    """Token ids of a document, cut behind what is scored, and the prefix lengths that it is judged at."""

    index: int
    ids: tuple[int, ...]
    lengths: tuple[int, ...]


@dataclass(frozen=True)
class _SourceRead:
    """What the source makes of a document: its cache and hidden states, and the target's cache mapped from them."""

    cache: KVCache
    hidden: Tensor
    mapped: KVCache


@torch.no_grad()
def evaluate(
    mapper: Mapper,
    source_model: Any,
    target_model: Any,
    documents: Iterable[Sequence[int]],
    protocol: Protocol | None = None,
    *,
    arms: Sequence[str] = ARMS,
    data: str = "unnamed",
    progress: Progress | None = None,
) -> Evaluation:
    """Run the protocol over the first documents that are long enough. Raises `MapperError` if there are none."""
    protocol = protocol or Protocol()
    _check_arms(arms)
    _check_context(protocol, source_model, target_model)
    chosen = choose_documents(documents, protocol)
    judge = _Judge(mapper, source_model, target_model, protocol, arms)
    scores: list[Score] = []
    for done, (document, other) in enumerate(zip(chosen, _others(chosen), strict=True), start=1):
        scores += judge.scores(document, other)
        if progress:
            progress(done, len(chosen))
    return Evaluation(
        data=data,
        head=protocol.head,
        tail=protocol.tail,
        scored=protocol.scored,
        tokens=protocol.scored * sum(len(document.lengths) for document in chosen),
        arms=summarise(scores, arms),
        lengths=tuple(_at_length(length, chosen, scores, arms) for length in protocol.lengths),
    )


def choose_documents(documents: Iterable[Sequence[int]], protocol: Protocol) -> list[Document]:
    """The first documents long enough for each length, longest first; reads no further than it must."""
    missing = dict.fromkeys(protocol.lengths, protocol.num_documents)
    longest = 0
    chosen = []
    for index, ids in enumerate(documents):
        longest = max(longest, len(ids))
        lengths = tuple(n for n in protocol.lengths if missing[n] and len(ids) >= n + protocol.scored)
        if lengths:
            chosen.append(Document(index, tuple(ids[: max(lengths) + protocol.scored]), lengths))
            missing.update({n: missing[n] - 1 for n in lengths})
        if not any(missing.values()):
            break
    for length, left in missing.items():
        if left == protocol.num_documents:
            needed = length + protocol.scored
            raise MapperError(f"no document of {needed} tokens for prefix length {length}; the longest has {longest}")
    return sorted(chosen, key=lambda document: -len(document.ids))


def _others(chosen: list[Document]) -> list[Document | None]:
    """For each document another one, if possible as long: the one before it, for the first the one behind."""
    return [chosen[1] if len(chosen) > 1 else None, *chosen[:-1]]


class _Judge:
    """Scores documents one after another; keeps what the last two have in common."""

    def __init__(self, mapper: Mapper, source: Any, target: Any, protocol: Protocol, arms: Sequence[str]):
        self._mapper, self._random = mapper, randomised(mapper)
        self._source, self._target, self._protocol, self._arms = source, target, protocol, arms
        self._reads: dict[int, _SourceRead] = {}

    def scores(self, document: Document, other: Document | None) -> Iterator[Score]:
        """Every arm at every length of a document; `other` serves as the wrong one."""
        native, hidden = run(self._target, document.ids[:-1])
        read = self._read(document)
        caches = Caches(
            native=native,
            mapped=read.mapped,
            wrong=self._read(other).mapped if other else None,
            random=self._random.map(read.cache),
            raw=raw(read.cache, native.geometry),
        )
        for length in document.lengths:
            scored = slice(length - 1, length - 1 + self._protocol.scored)
            truth = torch.tensor(document.ids[length : length + self._protocol.scored], device=hidden.device)
            reference = log_probs(self._target, hidden[scored])
            for arm, predicted in self._predictions(document, length, caches, read, scored):
                yield compare(arm, document.index, length, reference, predicted, truth)

    def _predictions(
        self, document: Document, length: int, caches: Caches, read: _SourceRead, scored: slice
    ) -> Iterator[tuple[str, Tensor]]:
        """Log-probabilities (scored, vocabulary) of each arm at one prefix length."""
        head, tail = self._protocol.head, self._protocol.tail
        native_head = caches.native.slice(0, head) if head else None
        for arm in CACHE_ARMS:
            cut = length - (tail if arm.native_tail else 1)
            cache = arm.cache(caches)
            if arm.name in self._arms and cache is not None and cache.num_tokens >= cut:
                behind = cache.slice(head, cut)
                past = KVCache.concatenate([native_head, behind]) if native_head else behind
                yield arm.name, self._read_on(document, past, cut, length)
        if "no_cache" in self._arms:
            yield "no_cache", self._read_on(document, native_head, length - tail, length)
        if "source_alone" in self._arms:
            yield "source_alone", log_probs(self._source, read.hidden[scored])

    def _read_on(self, document: Document, past: KVCache | None, cut: int, length: int) -> Tensor:
        """What the target predicts when it reads from position `cut` on, over `past`."""
        ids = document.ids[cut : length + self._protocol.scored - 1]
        _, hidden = run(self._target, ids, past, start=cut)
        return log_probs(self._target, hidden[-self._protocol.scored :])

    def _read(self, document: Document) -> _SourceRead:
        if document.index not in self._reads:
            cache, hidden = run(self._source, document.ids[:-1])
            self._reads[document.index] = _SourceRead(cache, hidden, self._mapper.map(cache))
            for old in list(self._reads)[:-2]:
                del self._reads[old]
        return self._reads[document.index]


def _at_length(length: int, chosen: list[Document], scores: list[Score], arms: Sequence[str]) -> LengthScores:
    return LengthScores(
        length=length,
        num_documents=sum(length in document.lengths for document in chosen),
        arms=summarise((score for score in scores if score.length == length), arms),
    )


def _check_arms(arms: Sequence[str]) -> None:
    unknown = [arm for arm in arms if arm not in ARMS]
    if unknown:
        raise MapperError(f"unknown arm {unknown[0]!r}; known: {', '.join(ARMS)}")


def _check_context(protocol: Protocol, *models: Any) -> None:
    needed = max(protocol.lengths) + protocol.scored
    for model in models:
        context = model.config.max_position_embeddings
        if needed > context:
            raise MapperError(f"{needed} tokens are more than the {context} that {model.config.model_type} can read")
