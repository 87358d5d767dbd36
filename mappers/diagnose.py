"""Locates a map's error: replaces one part of the native cache at a time by the mapped one and measures the loss.

    what       only the keys or only the values are mapped; the rest of the cache is native
    layers     only one group of the target's layers is mapped
    distance   only the tokens of one span before the native tail are mapped
    head       only one KV head is mapped, in every layer

Every row uses the same tail and scored tokens, over a cache that differs from the native one in that part alone. Meant
for documents of the tune split: the findings go into the next fit, and must not use up the test split.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mappers.cache import KVCache
from mappers.manifest import KINDS, ArmScore, Kind
from mappers.mapper import Mapper
from mappers.models import log_probs, predict, run
from mappers.protocol import EvalDocument, QualityProtocol, choose_documents, spans
from mappers.scores import DocumentScore, compare, summarise

MAX_LAYER_GROUPS = 5

Progress = Callable[[int, int], None]  # documents done, documents in total


@dataclass(frozen=True)
class CachePart:
    """A part of a cache: `kinds` of `layers`, in `heads`, for tokens `[begin, end)`.

    `by` is the division of the cache (a row of the table above), `name` the part in it.
    """

    by: str
    name: str
    kinds: tuple[Kind, ...]
    layers: range
    heads: range
    begin: int
    end: int

    def replace(self, native: KVCache, mapped: KVCache) -> KVCache:
        """Return `native` with this part taken from `mapped`; both start at token 0."""
        states = {kind: list(native.of(kind)) for kind in KINDS}
        heads, tokens = slice(self.heads.start, self.heads.stop), slice(self.begin, self.end)
        for kind in self.kinds:
            for layer in self.layers:
                changed = states[kind][layer].clone()
                changed[heads, tokens] = mapped.of(kind)[layer][heads, tokens]
                states[kind][layer] = changed
        return KVCache(tuple(states["keys"]), tuple(states["values"]))


@dataclass(frozen=True)
class PartScore:
    """Loss from mapping one part alone, compared with an all-native cache."""

    by: str
    part: str
    score: ArmScore


@torch.no_grad()
def diagnose(
    mapper: Mapper,
    source_model: Any,
    target_model: Any,
    documents: Iterable[Sequence[int]],
    protocol: QualityProtocol | None = None,
    progress: Progress | None = None,
) -> list[PartScore]:
    """Return one row for the whole cache and one per part, over the first documents that are long enough.

    Raises `MapperError` without one.
    """
    protocol = protocol or QualityProtocol()
    protocol.check_context(source_model, target_model)
    chosen = choose_documents(documents, protocol)
    scores: dict[tuple[str, str], list[DocumentScore]] = {}
    for done, document in enumerate(chosen, start=1):
        for part, score in _scores(mapper, source_model, target_model, document, protocol):
            scores.setdefault((part.by, part.name), []).append(score)
        if progress:
            progress(done, len(chosen))
    all_parts = parts(mapper, protocol.head, max(protocol.lengths) - protocol.tail)  # short prefixes lack far spans
    return [PartScore(part.by, part.name, summarise(scores[part.by, part.name], ["mapped"])[0]) for part in all_parts]


def parts(mapper: Mapper, begin: int, end: int) -> Iterator[CachePart]:
    """Yield the parts of a map of tokens `[begin, end)`, division by division."""
    geometry = mapper.manifest.target.geometry
    layers, heads = range(geometry.num_layers), range(geometry.num_kv_heads)
    yield CachePart("all", "all", KINDS, layers, heads, begin, end)
    for kind in KINDS:
        yield CachePart("what", kind, (kind,), layers, heads, begin, end)
    for group in layer_groups(geometry.num_layers):
        yield CachePart("layers", f"{group.start}-{group.stop - 1}", KINDS, group, heads, begin, end)
    for name, (near, far) in spans(end - begin).items():
        yield CachePart("distance", name, KINDS, layers, heads, end - far, end - near)
    for head in heads if len(heads) > 1 else ():
        yield CachePart("head", str(head), KINDS, layers, range(head, head + 1), begin, end)


def layer_groups(num_layers: int) -> list[range]:
    """Divide the layers into up to `MAX_LAYER_GROUPS` runs of about equal length."""
    groups = min(MAX_LAYER_GROUPS, num_layers)
    bounds = [num_layers * i // groups for i in range(groups + 1)]
    return [range(begin, end) for begin, end in zip(bounds, bounds[1:], strict=False)]


def _scores(
    mapper: Mapper, source: Any, target: Any, document: EvalDocument, protocol: QualityProtocol
) -> Iterator[tuple[CachePart, DocumentScore]]:
    """Score each part on one document at each of its prefix lengths."""
    native, hidden = run(target, document.ids[:-1])
    mapped = mapper.map(run(source, document.ids[:-1])[0])
    for length in document.lengths:
        cut = length - protocol.tail
        ids = document.ids[cut : length + protocol.scored - 1]
        truth = torch.tensor(document.ids[length : length + protocol.scored], device=hidden.device)
        reference = log_probs(target, hidden[length - 1 : length - 1 + protocol.scored])
        past = native.slice(0, cut)
        for part in parts(mapper, protocol.head, cut):
            predictions = predict(target, ids, part.replace(past, mapped), protocol.scored)
            yield part, compare("mapped", document.index, length, reference, predictions, truth)
