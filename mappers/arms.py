"""The caches that an evaluation compares: what is served, and the controls that tell whether it means anything.

native          the target's own cache
mapped          mapped, the head native; read on from the last prefix token
hybrid          as served: mapped, head and tail native
wrong_document  as hybrid, but mapped from another document
random_mapper   as hybrid, by random weights of the same size
raw_source      as hybrid, the source's keys and values as they are, layers matched by depth
no_cache        head and tail only
source_alone    the source model itself, with its own cache
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mappers.attention import compared
from mappers.cache import KVCache, KVGeometry
from mappers.errors import MapperError
from mappers.manifest import COPY, KINDS, Kind, LayerSpec, OutputSpec, weight_name
from mappers.mapper import Mapper
from mappers.models import continued, log_probs, predicted, run
from mappers.protocol import EvalDocument, QualityProtocol, spans
from mappers.scores import AttentionScores, DocumentScore, PrefixScores, compare

RANDOM = "random"


@dataclass(frozen=True)
class ArmCaches:
    """The caches of one document, each from token 0 on (`wrong` from another one); None where there can be none, and
    where controls are not asked for."""

    native: KVCache
    mapped: KVCache
    wrong: KVCache | None = None
    random: KVCache | None = None
    raw: KVCache | None = None


@dataclass(frozen=True)
class Arm:
    """`cache` picks what stands behind the native head; `native_tail` tells whether the tail is read natively.

    A control is judged on some of the documents only. One that is `shared` does not depend on the mapper.
    """

    name: str
    cache: Callable[[ArmCaches], KVCache | None]
    native_tail: bool = True
    control: bool = True
    shared: bool = False


# The three that no map and no source cache takes part in are treated apart.
CACHE_ARMS = (
    Arm("mapped", lambda caches: caches.mapped, native_tail=False, control=False),
    Arm("hybrid", lambda caches: caches.mapped, control=False),
    Arm("wrong_document", lambda caches: caches.wrong),
    Arm("random_mapper", lambda caches: caches.random),
    Arm("raw_source", lambda caches: caches.raw, shared=True),
)
ARMS = ("native", *(arm.name for arm in CACHE_ARMS), "no_cache", "source_alone")
ESSENTIAL = ("native", "mapped", "hybrid", "no_cache", "source_alone")  # where bundles are compared with one another


def check_arms(names: Sequence[str]) -> None:
    """Raise `MapperError` for a name that no arm has."""
    unknown = [name for name in names if name not in ARMS]
    if unknown:
        raise MapperError(f"unknown arm {unknown[0]!r}; known: {', '.join(ARMS)}")


def randomised(mapper: Mapper, seed: int = 0) -> Mapper:
    """The same mapper with random weights: of the fitted ones' spread, or where layers are copied, of unit gain."""
    generator = torch.Generator().manual_seed(seed)
    weights = dict(mapper.weights)
    width = mapper.manifest.source.geometry.width
    for layer, spec in enumerate(mapper.manifest.layers):
        for kind in KINDS:
            bias = weight_name(layer, kind, "bias")
            if spec.of(kind).method == COPY:
                drawn = torch.randn(width, width, generator=generator) / width**0.5
                weights |= {weight_name(layer, kind, "weight"): drawn, bias: torch.zeros(width)}
            for name in _matrices(mapper, layer, kind):
                fitted = weights[name].float()
                weights[name] = torch.randn(fitted.shape, generator=generator) * fitted.square().mean().sqrt()
    layers = tuple(LayerSpec(keys=_random(spec.keys), values=_random(spec.values)) for spec in mapper.manifest.layers)
    return Mapper(mapper.manifest.model_copy(update={"layers": layers}), weights, str(mapper.device))


def raw(source: KVCache, target: KVGeometry) -> KVCache | None:
    """The source's tensors in the target's places, layers and heads matched by their relative index; None if the heads
    differ in size."""
    geometry = source.geometry
    if geometry.head_dim != target.head_dim:
        return None
    layers = _spread(geometry.num_layers, target.num_layers)
    heads = torch.tensor(_spread(geometry.num_kv_heads, target.num_kv_heads), device=source.keys[0].device)

    def placed(states: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(states[layer][heads] for layer in layers)

    return KVCache(placed(source.keys), placed(source.values), source.start)


def _matrices(mapper: Mapper, layer: int, kind: Kind) -> list[str]:
    """Names of the tensors that a layer's features are multiplied with: all that it has but the bias."""
    prefix, bias = weight_name(layer, kind, ""), weight_name(layer, kind, "bias")
    return sorted(name for name in mapper.weights if name.startswith(prefix) and name != bias)


def _random(spec: OutputSpec) -> OutputSpec:
    return spec.model_copy(update={"method": RANDOM})


def _spread(have: int, want: int) -> list[int]:
    """For each of `want` places, which of `have` stands at the same relative depth."""
    return [round(i * (have - 1) / max(1, want - 1)) for i in range(want)]


@dataclass(frozen=True)
class _SourceRead:
    """What the source makes of a document: its cache and hidden states, and by mapper the target's cache from them."""

    cache: KVCache
    hidden: Tensor
    mapped: tuple[KVCache, ...]


@dataclass(frozen=True)
class _Prefix:
    """One prefix length of one document."""

    document: EvalDocument
    length: int
    protocol: QualityProtocol

    @property
    def is_control(self) -> bool:
        return self.length in self.document.controls

    @property
    def scored(self) -> slice:
        """Where the predictions stand that are scored."""
        return slice(self.length - 1, self.length - 1 + self.protocol.scored)

    @property
    def truth(self) -> tuple[int, ...]:
        return self.document.ids[self.length : self.length + self.protocol.scored]

    def cut(self, native_tail: bool) -> int:
        """Where native reading begins again."""
        return self.length - (self.protocol.tail if native_tail else 1)


class Examiner:
    """Scores documents one after another, for one mapper or several of the same two models."""

    def __init__(
        self, mappers: Sequence[Mapper], source: Any, target: Any, protocol: QualityProtocol, arms: Sequence[str]
    ):
        self._mappers, self._source, self._target = mappers, source, target
        self._protocol, self._arms = protocol, arms
        self._random = [randomised(mapper) for mapper in mappers] if "random_mapper" in arms else []
        self._reads: dict[int, _SourceRead] = {}

    def verdicts(self, document: EvalDocument, other: EvalDocument | None) -> list[list[PrefixScores]]:
        """By mapper, and by prefix length of the document; `other` serves as the wrong one."""
        native, hidden = run(self._target, document.ids[:-1])
        read = self._read(document)
        caches = self._caches(document, other, native, read)
        places = [_Prefix(document, length, self._protocol) for length in document.lengths]
        at_places = [self._at(place, caches, hidden, read.hidden) for place in places]
        return [list(verdicts) for verdicts in zip(*at_places, strict=True)]

    def _caches(
        self, document: EvalDocument, other: EvalDocument | None, native: KVCache, read: _SourceRead
    ) -> list[ArmCaches]:
        """By mapper; controls only where the document serves for them."""
        if not document.controls:
            return [ArmCaches(native, mapped) for mapped in read.mapped]
        none: list[KVCache | None] = [None] * len(read.mapped)
        wrong = self._read(other).mapped if other and "wrong_document" in self._arms else none
        random = [mapper.map(read.cache) for mapper in self._random] or none
        placed = raw(read.cache, native.geometry) if "raw_source" in self._arms else None
        return [ArmCaches(native, *parts, placed) for parts in zip(read.mapped, wrong, random, strict=True)]

    def _at(self, place: _Prefix, caches: list[ArmCaches], hidden: Tensor, source_hidden: Tensor) -> list[PrefixScores]:
        """By mapper, what is scored at one place."""
        truth = torch.tensor(place.truth, device=hidden.device)
        reference = log_probs(self._target, hidden[place.scored])

        def scores(predictions: Iterable[tuple[str, Tensor]]) -> tuple[DocumentScore, ...]:
            index, length = place.document.index, place.length
            return tuple(compare(arm, index, length, reference, found, truth) for arm, found in predictions)

        # 1. What no mapper takes part in is predicted once; on the way, the native attention is watched.
        attention: list[AttentionScores | None] = [None] * len(caches)
        shared: tuple[DocumentScore, ...] = ()
        if place.is_control and "native" in self._arms:
            predictions, attention = self._native(place, caches)
            shared += scores([("native", predictions)])
        shared += scores(self._over_caches(place, caches[0], shared=True))
        shared += scores(self._without_cache(place, caches[0].native, source_hidden))
        # 2. The rest by mapper.
        own = [scores(self._over_caches(place, each, shared=False)) for each in caches]
        greedy: list[float | None] = [None] * len(caches)
        if place.is_control and self._protocol.greedy:
            greedy = self._greedy(place, caches)
        rows = zip(own, attention, greedy, strict=True)
        return [PrefixScores(shared + mine, watched, generated) for mine, watched, generated in rows]

    def _native(self, place: _Prefix, caches: list[ArmCaches]) -> tuple[Tensor, list[AttentionScores | None]]:
        """What is predicted over the native cache, and by mapper how the attention would differ over the served one."""
        head, tail, cut = self._protocol.head, place.cut(native_tail=True), place.cut(native_tail=False)
        distances = {name: (tail - far, tail - near) for name, (near, far) in spans(tail - head).items()}
        stand_ins = [each.mapped.slice(*span) for each in caches for span in ((head, tail), *distances.values())]
        with compared(self._target, stand_ins) as found:
            predictions = self._read_on(place, caches[0].native.slice(0, cut), cut)
        means = [cosines.mean for cosines in found]  # (layers, heads) each
        watched: list[AttentionScores | None] = []
        for at in range(0, len(means), 1 + len(distances)):
            whole, *parts = means[at : at + 1 + len(distances)]
            by_distance = {name: float(part.mean()) for name, part in zip(distances, parts, strict=True)}
            watched.append(AttentionScores(whole, by_distance))
        return predictions, watched

    def _over_caches(self, place: _Prefix, caches: ArmCaches, shared: bool) -> Iterator[tuple[str, Tensor]]:
        """Log-probabilities (scored, vocabulary) of the arms that read on over a cache that isn't the target's."""
        for arm in CACHE_ARMS:
            cache, cut = arm.cache(caches), place.cut(arm.native_tail)
            asked = arm.name in self._arms and arm.shared == shared and (place.is_control or not arm.control)
            if asked and cache is not None and cache.num_tokens >= cut:
                yield arm.name, self._read_on(place, self._behind_head(caches.native, cache, cut), cut)

    def _without_cache(self, place: _Prefix, native: KVCache, source_hidden: Tensor) -> Iterator[tuple[str, Tensor]]:
        if "no_cache" in self._arms and place.is_control:
            cut, head = place.cut(native_tail=True), self._protocol.head
            yield "no_cache", self._read_on(place, native.slice(0, head) if head else None, cut)
        if "source_alone" in self._arms:
            yield "source_alone", log_probs(self._source, source_hidden[place.scored])

    def _greedy(self, place: _Prefix, caches: list[ArmCaches]) -> list[float | None]:
        """By mapper, how much of what is generated over the served cache is what the native one leads to."""
        ids, native, num_tokens = place.document.ids[: place.length], caches[0].native, self._protocol.greedy
        last, cut = place.cut(native_tail=False), place.cut(native_tail=True)
        right = continued(self._target, ids[last:], native.slice(0, last), num_tokens)
        served = (self._behind_head(native, each.mapped, cut) for each in caches)
        return [agreement(right, continued(self._target, ids[cut:], past, num_tokens)) for past in served]

    def _behind_head(self, native: KVCache, cache: KVCache, cut: int) -> KVCache:
        """The native head, and `cache` behind it up to `cut`."""
        head = self._protocol.head
        behind = cache.slice(head, cut)
        return KVCache.concatenate([native.slice(0, head), behind]) if head else behind

    def _read_on(self, place: _Prefix, past: KVCache | None, cut: int) -> Tensor:
        """What the target predicts when it reads from position `cut` on, over `past`."""
        ids = place.document.ids[cut : place.length + self._protocol.scored - 1]
        return predicted(self._target, ids, past, self._protocol.scored, start=cut)

    def _read(self, document: EvalDocument) -> _SourceRead:
        """By the source; the last two are kept, since a document is the wrong one of the next."""
        if document.index not in self._reads:
            cache, hidden = run(self._source, document.ids[:-1])
            mapped = tuple(mapper.map(cache) for mapper in self._mappers)
            self._reads[document.index] = _SourceRead(cache, hidden, mapped)
            for old in list(self._reads)[:-2]:
                del self._reads[old]
        return self._reads[document.index]


def agreement(one: Sequence[int], other: Sequence[int]) -> float:
    """Share of places where both have the same token."""
    return sum(a == b for a, b in zip(one, other, strict=True)) / len(one)
