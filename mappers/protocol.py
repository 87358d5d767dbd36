"""The quality protocol: which prefixes of which documents are judged.

For each document and prefix length L the target predicts the next `scored` tokens teacher-forced:

    0      head                 L - tail        L              L + scored
    |native|       mapped       |  read natively, over the map  |
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
# Distances before the native tail, the same whatever the prefix: a span stands for equal places at all lengths.
SPANS = {"0-64": (0, 64), "64-256": (64, 256), "256-512": (256, 512), "512-1024": (512, 1024), "1024+": (1024, None)}


@dataclass(frozen=True)
class QualityProtocol:
    """Which prefixes are judged, and how. `num_documents` is wanted for each length.

    The controls only have to tell a map from none, which they do on `num_controls` documents; what is served is judged
    on all. `greedy` tokens are generated freely on those same few, native against served; 0 leaves that out.
    """

    lengths: tuple[int, ...] = DEFAULT_LENGTHS
    num_documents: int = NUM_DOCUMENTS
    head: int = DEFAULT_HEAD
    tail: int = DEFAULT_TAIL
    scored: int = DEFAULT_SCORED
    num_controls: int = NUM_CONTROLS
    greedy: int = 0

    def __post_init__(self) -> None:
        least = {"head": 0, "tail": 1, "scored": 1, "num_documents": 1, "num_controls": 0, "greedy": 0}
        for name, smallest in least.items():
            if getattr(self, name) < smallest:
                raise MapperError(f"{name} is {getattr(self, name)}; allowed: {smallest} and more")
        if not self.lengths or min(self.lengths) <= self.head + self.tail:
            raise MapperError(f"lengths {self.lengths}: each must exceed head + tail = {self.head + self.tail}")

    def check_context(self, *models: Any) -> None:
        """Raise `MapperError` if one of the models can't read as far as the protocol goes."""
        needed = max(self.lengths) + max(self.scored, self.greedy)
        for model in models:
            context = context_of(model.config)
            if needed > context:
                raise MapperError(
                    f"{needed} tokens are more than the {context} that {model.config.model_type} can read"
                )


@dataclass(frozen=True)
class EvalDocument:
    """Token ids of a document, cut behind what is scored, and the prefix lengths that it is judged at.

    At the lengths in `controls` the controls are judged on it as well.
    """

    index: int
    ids: tuple[int, ...]
    lengths: tuple[int, ...]
    controls: tuple[int, ...] = ()


def choose_documents(documents: Iterable[Sequence[int]], protocol: QualityProtocol) -> list[EvalDocument]:
    """The first documents long enough for each length, longest first; reads no further than it must."""
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


def others(chosen: list[EvalDocument]) -> list[EvalDocument | None]:
    """For each document another one, if possible as long: the one before it, for the first the one behind."""
    return [chosen[1] if len(chosen) > 1 else None, *chosen[:-1]]


def tokens_read(document: EvalDocument, protocol: QualityProtocol, num_mappers: int = 1) -> int:
    """About how many tokens two models read to judge this document; tells how much of the work is done."""
    served, controls = 2 * protocol.scored + protocol.tail, 5 * (protocol.scored + protocol.tail) + 2 * protocol.greedy
    return 2 * len(document.ids) + num_mappers * (len(document.lengths) * served + len(document.controls) * controls)


def spans(num_tokens: int) -> dict[str, tuple[int, int]]:
    """Those of `SPANS` that some of `num_tokens` tokens lie in, as far as they go, nearest first."""
    there = {name: span for name, span in SPANS.items() if span[0] < num_tokens}
    return {name: (near, min(far or num_tokens, num_tokens)) for name, (near, far) in there.items()}
