"""The arms of an evaluation, what is served and its controls, and how they are scored on one document.

native          the target's own cache
mapped          mapped, with native head; continued from the last prefix token
hybrid          as served: mapped, with native head and tail
wrong_document  as hybrid, but mapped from another document
random_mapper   as hybrid, with random weights of the same magnitude
raw_source      as hybrid, with the source's keys and values unmapped, layers matched by depth
no_cache        head and tail only
source_alone    the source model with its own cache
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mappers.attention import compare_attention
from mappers.cache import KVCache, KVGeometry
from mappers.errors import MapperError
from mappers.manifest import COPY, KINDS, LayerSpec, weight_name
from mappers.mapper import Mapper
from mappers.models import generate_greedy, log_probs, predict, run
from mappers.protocol import EvalDocument, QualityProtocol, spans
from mappers.scores import AttentionScores, DocumentScore, PrefixScores, compare

RANDOM = "random"


@dataclass(frozen=True)
class ArmCaches:
    """Caches of one document from token 0 on; `wrong` is mapped from another document.

    None if a cache cannot exist, or if no controls are requested.
    """

    native: KVCache
    mapped: KVCache
    wrong: KVCache | None = None
    random: KVCache | None = None
    raw: KVCache | None = None


@dataclass(frozen=True)
class Arm:
    """`cache` selects the cache after the native head. With `native_tail` the tail is prefilled natively.

    A `control` is evaluated on some documents only. A `shared` arm does not depend on the mapper.
    """

    name: str
    cache: Callable[[ArmCaches], KVCache | None]
    native_tail: bool = True
    control: bool = True
    shared: bool = False


# The three other arms involve neither a map nor a source cache.
CACHE_ARMS = (
    Arm("mapped", lambda caches: caches.mapped, native_tail=False, control=False),
    Arm("hybrid", lambda caches: caches.mapped, control=False),
    Arm("wrong_document", lambda caches: caches.wrong),
    Arm("random_mapper", lambda caches: caches.random),
    Arm("raw_source", lambda caches: caches.raw, shared=True),
)
ARMS = ("native", *(arm.name for arm in CACHE_ARMS), "no_cache", "source_alone")
COMPARISON_ARMS = ("native", "mapped", "hybrid", "no_cache", "source_alone")  # default for several bundles


def check_arms(names: Sequence[str]) -> None:
    """Raise `MapperError` for an unknown arm."""
    unknown = [name for name in names if name not in ARMS]
    if unknown:
        raise MapperError(f"unknown arm {unknown[0]!r}; known: {', '.join(ARMS)}")


def randomise(mapper: Mapper, seed: int = 0) -> Mapper:
    """Return the mapper with random weights: of the fitted magnitude, or of unit gain instead of a copy."""
    generator = torch.Generator().manual_seed(seed)
    weights = dict(mapper.weights)
    width = mapper.manifest.source.geometry.width
    for layer, spec in enumerate(mapper.manifest.layers):
        for kind in KINDS:
            bias = weight_name(layer, kind, "bias")
            if spec.of(kind).method == COPY:
                drawn = torch.randn(width, width, generator=generator) / width**0.5
                weights |= {weight_name(layer, kind, "weight"): drawn, bias: torch.zeros(width)}
            prefix = weight_name(layer, kind, "")
            for name in sorted(name for name in mapper.weights if name.startswith(prefix) and name != bias):
                fitted = weights[name].float()
                weights[name] = torch.randn(fitted.shape, generator=generator) * fitted.square().mean().sqrt()
    layers = tuple(
        LayerSpec(**{kind: spec.of(kind).model_copy(update={"method": RANDOM}) for kind in KINDS})
        for spec in mapper.manifest.layers
    )
    return Mapper(mapper.manifest.model_copy(update={"layers": layers}), weights, str(mapper.device))


def match_by_depth(source: KVCache, target: KVGeometry) -> KVCache | None:
    """Arrange the source's tensors in the target's shape, matching layers and heads by relative index.

    None if the heads differ in size.
    """
    geometry = source.geometry
    if geometry.head_dim != target.head_dim:
        return None
    layers = _relative_indices(geometry.num_layers, target.num_layers)
    heads = torch.tensor(_relative_indices(geometry.num_kv_heads, target.num_kv_heads), device=source.keys[0].device)

    def arrange(states: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(states[layer][heads] for layer in layers)

    return KVCache(arrange(source.keys), arrange(source.values), source.start)


def _relative_indices(have: int, want: int) -> list[int]:
    return [round(i * (have - 1) / max(1, want - 1)) for i in range(want)]


def agreement(one: Sequence[int], other: Sequence[int]) -> float:
    """Return the share of positions with equal tokens."""
    return sum(a == b for a, b in zip(one, other, strict=True)) / len(one)


# Scoring one document.


@dataclass(frozen=True)
class _SourceStates:
    """The source's cache and hidden states of a document, and the mapped cache of each mapper."""

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
        """Positions whose predictions are scored."""
        return slice(self.length - 1, self.length - 1 + self.protocol.scored)

    @property
    def truth(self) -> tuple[int, ...]:
        return self.document.ids[self.length : self.length + self.protocol.scored]

    def cut(self, native_tail: bool) -> int:
        """Return the position where native prefill resumes."""
        return self.length - (self.protocol.tail if native_tail else 1)


class Examiner:
    """Scores documents one after another, for one or more mappers between the same two models.

    Each model prefills a document once; all arms at all prefix lengths start from those caches.
    """

    def __init__(
        self, mappers: Sequence[Mapper], source: Any, target: Any, protocol: QualityProtocol, arms: Sequence[str]
    ):
        self._mappers, self._source, self._target = mappers, source, target
        self._protocol, self._arms = protocol, arms
        self._random = [randomise(mapper) for mapper in mappers] if "random_mapper" in arms else []
        self._states: dict[int, _SourceStates] = {}

    def score(self, document: EvalDocument, other: EvalDocument | None) -> list[list[PrefixScores]]:
        """Return scores by mapper, then by prefix length; `other` is the document of the arm `wrong_document`."""
        native, hidden = run(self._target, document.ids[:-1])
        states = self._source_states(document)
        caches = self._caches(document, other, native, states)
        prefixes = [_Prefix(document, length, self._protocol) for length in document.lengths]
        by_prefix = [self._score_prefix(prefix, caches, hidden, states.hidden) for prefix in prefixes]
        return [list(scores) for scores in zip(*by_prefix, strict=True)]

    def _caches(
        self, document: EvalDocument, other: EvalDocument | None, native: KVCache, states: _SourceStates
    ) -> list[ArmCaches]:
        """Return the caches by mapper, with controls only if the document is used for them."""
        if not document.controls:
            return [ArmCaches(native, mapped) for mapped in states.mapped]
        missing: list[KVCache | None] = [None] * len(states.mapped)
        wrong = self._source_states(other).mapped if other and "wrong_document" in self._arms else missing
        random = [mapper.map(states.cache) for mapper in self._random] or missing
        raw = match_by_depth(states.cache, native.geometry) if "raw_source" in self._arms else None
        return [ArmCaches(native, *parts, raw) for parts in zip(states.mapped, wrong, random, strict=True)]

    def _score_prefix(
        self, prefix: _Prefix, caches: list[ArmCaches], hidden: Tensor, source_hidden: Tensor
    ) -> list[PrefixScores]:
        """Return the scores at one prefix length by mapper."""
        truth = torch.tensor(prefix.truth, device=hidden.device)
        reference = log_probs(self._target, hidden[prefix.scored])

        def scores(predictions: Iterable[tuple[str, Tensor]]) -> tuple[DocumentScore, ...]:
            index, length = prefix.document.index, prefix.length
            return tuple(compare(arm, index, length, reference, found, truth) for arm, found in predictions)

        # 1. Arms that involve no mapper are predicted once. The native one also compares attention.
        attention: list[AttentionScores | None] = [None] * len(caches)
        shared: tuple[DocumentScore, ...] = ()
        if prefix.is_control and "native" in self._arms:
            predictions, attention = self._native(prefix, caches)
            shared += scores([("native", predictions)])
        shared += scores(self._over_caches(prefix, caches[0], shared=True))
        shared += scores(self._without_cache(prefix, caches[0].native, source_hidden))
        # 2. The others by mapper.
        own = [scores(self._over_caches(prefix, each, shared=False)) for each in caches]
        greedy: list[float | None] = [None] * len(caches)
        if prefix.is_control and self._protocol.greedy:
            greedy = self._greedy(prefix, caches)
        rows = zip(own, attention, greedy, strict=True)
        return [PrefixScores(shared + scored, cosines, generated) for scored, cosines, generated in rows]

    def _native(self, prefix: _Prefix, caches: list[ArmCaches]) -> tuple[Tensor, list[AttentionScores | None]]:
        """Predict over the native cache, comparing its attention with that over each mapper's served cache."""
        head, tail, cut = self._protocol.head, prefix.cut(native_tail=True), prefix.cut(native_tail=False)
        distances = {name: (tail - far, tail - near) for name, (near, far) in spans(tail - head).items()}
        stand_ins = [each.mapped.slice(*span) for each in caches for span in ((head, tail), *distances.values())]
        with compare_attention(self._target, stand_ins) as comparisons:
            predictions = self._continue(prefix, caches[0].native.slice(0, cut), cut)
        means = [cosines.mean for cosines in comparisons]  # (layers, heads) each
        attention: list[AttentionScores | None] = []
        for at in range(0, len(means), 1 + len(distances)):
            whole, *parts = means[at : at + 1 + len(distances)]
            by_distance = {name: float(part.mean()) for name, part in zip(distances, parts, strict=True)}
            attention.append(AttentionScores(whole, by_distance))
        return predictions, attention

    def _over_caches(self, prefix: _Prefix, caches: ArmCaches, shared: bool) -> Iterator[tuple[str, Tensor]]:
        """Yield log-probabilities (scored, vocabulary) of the arms that continue over a cache other than the native."""
        for arm in CACHE_ARMS:
            cache, cut = arm.cache(caches), prefix.cut(arm.native_tail)
            is_wanted = arm.name in self._arms and arm.shared == shared and (prefix.is_control or not arm.control)
            if is_wanted and cache is not None and cache.num_tokens >= cut:
                yield arm.name, self._continue(prefix, self._with_native_head(caches.native, cache, cut), cut)

    def _without_cache(self, prefix: _Prefix, native: KVCache, source_hidden: Tensor) -> Iterator[tuple[str, Tensor]]:
        if "no_cache" in self._arms and prefix.is_control:
            cut, head = prefix.cut(native_tail=True), self._protocol.head
            yield "no_cache", self._continue(prefix, native.slice(0, head) if head else None, cut)
        if "source_alone" in self._arms:
            yield "source_alone", log_probs(self._source, source_hidden[prefix.scored])

    def _greedy(self, prefix: _Prefix, caches: list[ArmCaches]) -> list[float | None]:
        """Return by mapper the agreement of greedy generation over the served and the native cache."""
        ids, native, num_tokens = prefix.document.ids[: prefix.length], caches[0].native, self._protocol.greedy
        last, cut = prefix.cut(native_tail=False), prefix.cut(native_tail=True)
        expected = generate_greedy(self._target, ids[last:], native.slice(0, last), num_tokens)
        served = (self._with_native_head(native, each.mapped, cut) for each in caches)
        return [agreement(expected, generate_greedy(self._target, ids[cut:], past, num_tokens)) for past in served]

    def _with_native_head(self, native: KVCache, cache: KVCache, cut: int) -> KVCache:
        """Return `cache` up to `cut`, its head replaced by the native one."""
        head = self._protocol.head
        rest = cache.slice(head, cut)
        return KVCache.concatenate([native.slice(0, head), rest]) if head else rest

    def _continue(self, prefix: _Prefix, past: KVCache | None, cut: int) -> Tensor:
        """Return the target's predictions when it prefills from position `cut` on, over `past`."""
        ids = prefix.document.ids[cut : prefix.length + self._protocol.scored - 1]
        return predict(self._target, ids, past, self._protocol.scored, start=cut)

    def _source_states(self, document: EvalDocument) -> _SourceStates:
        """Return the source's states. Those of the last two documents are kept: one is the other's wrong document."""
        if document.index not in self._states:
            cache, hidden = run(self._source, document.ids[:-1])
            mapped = tuple(mapper.map(cache) for mapper in self._mappers)
            self._states[document.index] = _SourceStates(cache, hidden, mapped)
            for old in list(self._states)[:-2]:
                del self._states[old]
        return self._states[document.index]
