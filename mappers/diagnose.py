"""Where a map's error lies: parts of the native cache are replaced by mapped ones, and the loss of each is measured.

    what       only the keys are mapped, or only the values; the rest of the cache is native
    layers     only a group of the target's layers is mapped
    distance   only tokens so far before the native tail are mapped
    head       only one KV head is mapped, in every layer

Every row reads the same tail and the same tokens over a cache that differs from the native one in that part alone.
Meant for tune documents: what is learnt here goes into the next fit, so the test split must not be spent on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mappers.cache import KVCache
from mappers.manifest import KINDS, ArmScore, Kind
from mappers.mapper import Mapper
from mappers.models import log_probs, predicted, run
from mappers.protocol import EvalDocument, QualityProtocol, choose_documents, spans
from mappers.scores import DocumentScore, compare, summarise

GROUPS = 5  # of layers

Progress = Callable[[int, int], None]  # documents done, documents to do


@dataclass(frozen=True)
class CachePart:
    """A part of a cache: `kinds` of `layers`, in `heads`, for the tokens from `begin` up to `end`."""

    by: str
    name: str
    kinds: tuple[Kind, ...]
    layers: range
    heads: range
    begin: int
    end: int

    def replaced(self, native: KVCache, mapped: KVCache) -> KVCache:
        """`native` with this part of it from `mapped`; both start at token 0."""
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
    """What mapping one part alone costs, against an all-native cache; `by` tells how the cache was divided."""

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
    """A row a part, and one for all of it, division after division, over the first documents that are long enough.

    Raises `MapperError` if there are none."""
    protocol = protocol or QualityProtocol()
    protocol.check_context(source_model, target_model)
    chosen = choose_documents(documents, protocol)
    found: dict[tuple[str, str], list[DocumentScore]] = {}
    for done, document in enumerate(chosen, start=1):
        for part, score in _scores(mapper, source_model, target_model, document, protocol):
            found.setdefault((part.by, part.name), []).append(score)
        if progress:
            progress(done, len(chosen))
    everything = parts(mapper, protocol.head, max(protocol.lengths) - protocol.tail)  # a short prefix lacks far spans
    return [PartScore(part.by, part.name, summarise(found[part.by, part.name], ["mapped"])[0]) for part in everything]


def parts(mapper: Mapper, begin: int, end: int) -> Iterator[CachePart]:
    """The parts of a map of tokens `[begin, end)` that are looked at, those of one division after another."""
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
    """At most `GROUPS` runs of neighbouring layers, as equal as can be."""
    groups = min(GROUPS, num_layers)
    bounds = [num_layers * i // groups for i in range(groups + 1)]
    return [range(begin, end) for begin, end in zip(bounds, bounds[1:], strict=False)]


def _scores(
    mapper: Mapper, source: Any, target: Any, document: EvalDocument, protocol: QualityProtocol
) -> Iterator[tuple[CachePart, DocumentScore]]:
    """Each part on one document, at each of its prefix lengths."""
    native, hidden = run(target, document.ids[:-1])
    mapped = mapper.map(run(source, document.ids[:-1])[0])
    for length in document.lengths:
        cut = length - protocol.tail
        ids = document.ids[cut : length + protocol.scored - 1]
        truth = torch.tensor(document.ids[length : length + protocol.scored], device=hidden.device)
        reference = log_probs(target, hidden[length - 1 : length - 1 + protocol.scored])
        past = native.slice(0, cut)
        for part in parts(mapper, protocol.head, cut):
            predictions = predicted(target, ids, part.replaced(past, mapped), protocol.scored)
            yield part, compare("mapped", document.index, length, reference, predictions, truth)
