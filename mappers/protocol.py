"""The quality protocol: which prefixes of which documents are evaluated.

For each document and prefix length L the target predicts the next `scored` tokens, teacher-forced:

    0      head                 L - tail        L              L + scored
    |native|       mapped       | prefilled natively, over the map |
                                                ^ scored from here
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from mappers.errors import MapperError
from mappers.manifest import DEFAULT_HEAD, DEFAULT_LENGTHS, DEFAULT_SCORED, DEFAULT_TAIL
from mappers.model_config import context_of

NUM_DOCUMENTS, NUM_CONTROLS = 50, 10
# Distances before the native tail. They do not depend on the prefix length, so spans compare across lengths.
SPANS = {"0-64": (0, 64), "64-256": (64, 256), "256-512": (256, 512), "512-1024": (512, 1024), "1024+": (1024, None)}


@dataclass(frozen=True)
class QualityProtocol:
    """Prefix lengths and documents of an evaluation, `num_documents` at each length.

    Controls only have to show that a map does better than none, for which `num_controls` documents are enough. What is
    served is evaluated on all documents. On the control documents `greedy` tokens are also generated, over the native
    and over the served cache; 0 skips this.
    """

    lengths: tuple[int, ...] = DEFAULT_LENGTHS
    num_documents: int = NUM_DOCUMENTS
    head: int = DEFAULT_HEAD
    tail: int = DEFAULT_TAIL
    scored: int = DEFAULT_SCORED
    num_controls: int = NUM_CONTROLS
    greedy: int = 0

    def __post_init__(self) -> None:
        minimum = {"head": 0, "tail": 1, "scored": 1, "num_documents": 1, "num_controls": 0, "greedy": 0}
        for name, least in minimum.items():
            if getattr(self, name) < least:
                raise MapperError(f"{name} is {getattr(self, name)}; allowed: {least} or more")
        if not self.lengths or min(self.lengths) <= self.head + self.tail:
            raise MapperError(f"lengths {self.lengths}: each must exceed head + tail = {self.head + self.tail}")

    def check_context(self, *models: Any) -> None:
        """Raise `MapperError` if the protocol exceeds the context of one of the models."""
        needed = max(self.lengths) + max(self.scored, self.greedy)
        for model in models:
            context = context_of(model.config)
            if needed > context:
                raise MapperError(f"{needed} tokens exceed the context of {context} of {model.config.model_type}")


@dataclass(frozen=True)
class EvalDocument:
    """Token ids of a document, cut after the scored tokens, and the prefix lengths it is evaluated at.

    Controls are evaluated at the lengths in `controls` only.
    """

    index: int
    ids: tuple[int, ...]
    lengths: tuple[int, ...]
    controls: tuple[int, ...] = ()


def choose_documents(documents: Iterable[Sequence[int]], protocol: QualityProtocol) -> list[EvalDocument]:
    """Return the first documents long enough for each length, longest first; stops at the last one needed."""
    missing = dict.fromkeys(protocol.lengths, protocol.num_documents)
    longest = 0
    chosen = []
    for index, ids in enumerate(documents):
        longest = max(longest, len(ids))
        lengths = tuple(n for n in protocol.lengths if missing[n] and len(ids) >= n + protocol.scored)
        if lengths:
            controls = tuple(n for n in lengths if protocol.num_documents - missing[n] < protocol.num_controls)
            chosen.append(EvalDocument(index, tuple(ids[: max(lengths) + protocol.scored]), lengths, controls))
            missing.update({n: missing[n] - 1 for n in lengths})
        if not any(missing.values()):
            break
    for length, left in missing.items():
        if left == protocol.num_documents:
            needed = length + protocol.scored
            raise MapperError(f"no document of {needed} tokens for prefix length {length}; the longest has {longest}")
    return sorted(chosen, key=lambda document: -len(document.ids))


def other_documents(chosen: list[EvalDocument]) -> list[EvalDocument | None]:
    """Return for each document another one, at least as long if possible: the one before, for the first the second."""
    return [chosen[1] if len(chosen) > 1 else None, *chosen[:-1]]


def estimated_tokens(document: EvalDocument, protocol: QualityProtocol, num_mappers: int = 1) -> int:
    """Estimate the tokens both models process to evaluate this document, for progress."""
    served, controls = 2 * protocol.scored + protocol.tail, 5 * (protocol.scored + protocol.tail) + 2 * protocol.greedy
    return 2 * len(document.ids) + num_mappers * (len(document.lengths) * served + len(document.controls) * controls)


def spans(num_tokens: int) -> dict[str, tuple[int, int]]:
    """Return the `SPANS` that contain some of the last `num_tokens` tokens, clipped to them, nearest first."""
    present = {name: span for name, span in SPANS.items() if span[0] < num_tokens}
    return {name: (near, min(far or num_tokens, num_tokens)) for name, (near, far) in present.items()}
