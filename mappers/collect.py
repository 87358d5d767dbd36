"""Prefills calibration documents with both models and keeps only statistics of their caches.

One Gram matrix over the features of all source layers, and cross-moments with all target layers. Choosing layers, their
number and the penalty is then linear algebra on sub-blocks, without a second pass over the data.
"""

from __future__ import annotations

import hashlib
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mappers.attention import AttentionReceived, shrink_weights, watch_attention
from mappers.cache import KVCache, KVGeometry, rows_of
from mappers.checkpoint import Checkpoint, CheckpointState
from mappers.errors import CalibrationTooSmall, CheckpointMismatch, DataUnreadable, MapperError
from mappers.manifest import KINDS, Block, Kind, Target
from mappers.methods import Layout
from mappers.methods.hidden import check_projections, projections, record_hidden_states
from mappers.model_config import context_of, geometry_of
from mappers.models import prefill
from mappers.rope import Rope
from mappers.settings import FitSettings, Wanted
from mappers.stats import BATCH, Moments, RowAccumulator

HELD_OUT_EVERY = 8  # documents, from the second on
MAX_DOCUMENT_TOKENS = 2048
SAMPLE_DOCUMENTS, SAMPLE_TOKENS = 4, 512  # held-out documents kept as token ids, and max tokens of each
COPY_TOLERANCE = 1e-5  # relative; float32 states of equal arithmetic may differ this much between runs
COPY_SAMPLE_TOKENS = 64  # of the first document, compared to find copies
ROWS_BYTES = 2**30  # max memory of raw rows before they are folded to moments

Progress = Callable[[int, int | None], None]  # tokens done, tokens in total if known


@dataclass(frozen=True)
class DocumentStates:
    """Cache, normed hidden states by layer (T, hidden) and token weights (T,) of one document in one model."""

    cache: KVCache
    hidden: dict[int, Tensor]
    weights: Tensor | None = None

    def rows(self, wanted: Wanted) -> Tensor:
        """(T, width)."""
        kind, layer = wanted
        return self.hidden[layer] if kind == "hidden" else rows_of(self.cache.of(kind)[layer])


class FeatureGroup:
    """Targets predicted from the same features: `kinds` of all source layers, one column per (kind, layer, head, dim).

    More than `max_rows` rows are folded to moments.
    """

    def __init__(
        self,
        kinds: tuple[Kind, ...],
        targets: Sequence[Wanted],
        source: KVGeometry,
        layout: Layout,
        device: Any,
        max_rows: int,
    ):
        self.kinds, self.targets, self.source, self.layout = kinds, list(targets), source, layout
        self.device, self._max_rows = device, max_rows
        self.blocks: list[Block] = [(kind, layer) for kind in kinds for layer in range(source.num_layers)]
        size = _group_size(kinds, targets, source, layout.target_width)
        self.train, self.held_out = RowAccumulator(*size, device), RowAccumulator(*size, device)

    def features(self, blocks: Sequence[Block]) -> Tensor:
        """Return the columns of these blocks, in their order."""
        width = self.source.width
        starts = [self.blocks.index(block) * width for block in blocks]
        return torch.cat([torch.arange(s, s + width) for s in starts]).to(self.device)

    def outputs(self, index: int) -> Tensor:
        """Return the columns of `targets[index]`."""
        width = self.layout.target_width
        return torch.arange(index * width, (index + 1) * width, device=self.device)

    def update(self, source: DocumentStates, target: DocumentStates, held_out: bool) -> None:
        """Add one document. Its keys carry no position."""
        x = torch.cat([source.rows(block) for block in self.blocks], dim=1)
        y = torch.cat([target.rows(wanted) for wanted in self.targets], dim=1)
        if self.train.moments is None and self.train.count + self.held_out.count + len(x) > self._max_rows:
            self.fold()
        (self.held_out if held_out else self.train).update(x, y, target.weights)

    def fold(self) -> None:
        """Replace all rows by their moments."""
        for accumulator in (self.train, self.held_out):
            accumulator.fold()


@dataclass(frozen=True)
class CalibrationStatistics:
    """Result of `collect`. `sample` holds some held-out documents; `prefill_s` is the time spent in the models."""

    groups: list[FeatureGroup]
    copies: dict[Target, int]
    num_documents: int
    num_tokens: int
    digest: str
    sample: list[list[int]]
    prefill_s: float


@torch.no_grad()
def collect(
    models: tuple[Any, Any],
    ropes: tuple[Rope, Rope],
    documents: Iterable[Sequence[int]],
    settings: FitSettings,
    *,
    progress: Progress | None = None,
    checkpoint: Checkpoint | None = None,
) -> CalibrationStatistics:
    """Prefill documents with source and target, up to `settings.tokens` tokens.

    Documents already in the `checkpoint` are skipped. An interrupt or unreadable data saves what was collected so far.
    Raises `CheckpointMismatch` if the checkpoint holds other documents or more tokens.
    """
    # 1. Resume from the checkpoint.
    longest = max_document_tokens(model.config for model in models)
    stream = _DocumentStream(usable_documents(documents, settings.head, longest))
    collector = _Collector(models, ropes, settings)
    state, max_tokens = checkpoint.load() if checkpoint else None, settings.tokens
    if state:
        collector.restore(state)
        stream.skip(state.num_documents)
        state.check_documents(stream.digest)
        if max_tokens is not None and state.num_tokens - stream.num_last >= max_tokens:
            raise CheckpointMismatch(f"the checkpoint holds {state.num_tokens} tokens; allowed: at most {max_tokens}")
    # 2. Add every document to the statistics.
    num_saved = collector.num_documents
    try:
        while (max_tokens is None or collector.num_tokens < max_tokens) and (ids := stream.next()):
            collector.add(ids, stream.digest)
            if progress:
                progress(collector.num_tokens, max_tokens)
            if checkpoint and checkpoint.is_due:
                checkpoint.save(collector.state())
                num_saved = collector.num_documents
    except (KeyboardInterrupt, DataUnreadable):
        if checkpoint and collector.num_documents > num_saved:
            checkpoint.save(collector.state())
        raise
    if checkpoint and checkpoint.is_due_at_end and collector.num_documents > num_saved:
        checkpoint.save(collector.state())
    # 3. Layers that were copies in the first document must be copies in all.
    collector.finder.confirm()
    if not collector.num_documents:
        raise CalibrationTooSmall(f"no document of more than {settings.head + 1} tokens")
    return CalibrationStatistics(
        collector.groups,
        collector.finder.copies,
        collector.num_documents,
        collector.num_tokens,
        collector.digest,
        stream.sample,
        collector.prefill_s,
    )


def statistics_bytes(
    source: KVGeometry, target: KVGeometry, settings: FitSettings, hidden_size: int = 0, max_tokens: int | None = None
) -> int:
    """Return the max memory of the statistics and of the rows before them. Copied layers will need none."""
    width = hidden_size if settings.hidden else target.width
    groups = [(kinds, settings.wanted(kinds, target.num_layers, {})) for kinds in settings.feature_kinds]
    sizes = [_group_size(*group, source, width) for group in groups]
    rows = max_buffered_rows(sizes)
    if max_tokens is not None:
        rows = min(rows, max_tokens + MAX_DOCUMENT_TOKENS)
    return _moments_bytes(sizes) + rows * _row_bytes(sizes)


def max_buffered_rows(sizes: Sequence[tuple[int, int]]) -> int:
    """Return how many rows are kept before they are folded: as many as take less memory than the moments.

    `sizes` are the numbers of features and targets of each group.
    """
    return max(min(ROWS_BYTES, _moments_bytes(sizes)) // _row_bytes(sizes), 2 * BATCH)


def _row_bytes(sizes: Sequence[tuple[int, int]]) -> int:
    return sum(RowAccumulator.bytes_for(*size) for size in sizes)


def _moments_bytes(sizes: Sequence[tuple[int, int]]) -> int:
    return sum(2 * Moments.bytes_for(*size) for size in sizes)


def _group_size(
    kinds: Sequence[Kind], targets: Sequence[Wanted], source: KVGeometry, target_width: int
) -> tuple[int, int]:
    """Return the numbers of features and targets of a group."""
    return len(kinds) * source.num_layers * source.width, len(targets) * target_width


def usable_documents(documents: Iterable[Sequence[int]], head: int, longest: int) -> Iterator[list[int]]:
    """Yield documents longer than the skipped head, each cut to `longest` tokens."""
    return (list(ids[:longest]) for ids in documents if len(ids) > head + 1)


def max_document_tokens(configs: Iterable[Any]) -> int:
    """Return the bound on a document's tokens for models of these configs."""
    return min(MAX_DOCUMENT_TOKENS, *map(context_of, configs))


def num_training_rows(lengths: Iterable[int], settings: FitSettings) -> int:
    """Return the number of rows that documents of these lengths give to train on, without head and held-out ones."""
    return sum(length - settings.head for index, length in enumerate(lengths) if not is_held_out(index))


def is_held_out(document: int) -> bool:
    """Return whether the document of this index is held out to choose by."""
    return document % HELD_OUT_EVERY == 1


class _DocumentStream:
    """Documents in order, with a digest of all so far. `num_last` is the length of the last one."""

    def __init__(self, documents: Iterator[list[int]]):
        self._rest = documents
        self._digest = hashlib.sha256()
        self._num_documents = self.num_last = 0
        self.sample: list[list[int]] = []

    @property
    def digest(self) -> str:
        """SHA-256 over all token ids so far."""
        return self._digest.hexdigest()

    def next(self) -> list[int] | None:
        ids = next(self._rest, None)
        if ids is None:
            return None
        self._digest.update(len(ids).to_bytes(4, "little") + b"".join(i.to_bytes(4, "little") for i in ids))
        if is_held_out(self._num_documents) and len(self.sample) < SAMPLE_DOCUMENTS:
            self.sample.append(ids[:SAMPLE_TOKENS])
        self._num_documents, self.num_last = self._num_documents + 1, len(ids)
        return ids

    def skip(self, num_documents: int) -> None:
        for _ in range(num_documents):
            self.next()


class _Collector:
    """Statistics of the documents so far. The first document shows which layers are copies and need no fit."""

    def __init__(self, models: tuple[Any, Any], ropes: tuple[Rope, Rope], settings: FitSettings):
        self._models, self._ropes, self._settings = models, ropes, settings
        self.groups: list[FeatureGroup] = []
        self.finder = CopyFinder({})
        self.num_documents = self.num_tokens = 0
        self.digest = ""
        self.prefill_s = 0.0

    def add(self, ids: list[int], digest: str) -> None:
        """Prefill one more document; `digest` covers all documents so far. An interrupt adds it whole or not at all."""
        began = time.perf_counter()
        source, target = DocumentStates(prefill(self._models[0], ids), {}), self._prefill_target(ids)
        self.prefill_s += time.perf_counter() - began
        with defer_interrupts():
            self._update(ids, source.cache, target)
            self.digest = digest

    def _prefill_target(self, ids: list[int]) -> DocumentStates:
        model = self._models[1]
        received = AttentionReceived(len(ids), model.device)
        hidden: dict[int, Tensor] = {}
        with ExitStack() as hooks:
            if self._settings.weighting == "attention":
                hooks.enter_context(watch_attention(model, received))
            if self._settings.hidden:
                hidden = hooks.enter_context(record_hidden_states(model))
            cache = prefill(model, ids)
        return DocumentStates(cache, hidden, received.mean())

    def _update(self, ids: list[int], source_cache: KVCache, full: DocumentStates) -> None:
        # 1. Without the head.
        head = self._settings.head
        source, target = source_cache.slice(head, len(ids)), full.cache.slice(head, len(ids))
        hidden = {layer: states[head:] for layer, states in full.hidden.items()}
        weights = None
        if self._settings.weighting == "attention" and full.weights is not None:
            weights = shrink_weights(full.weights[head:], self._settings.effective_share)
        # 2. Copies are compared with RoPE.
        if not self.num_documents:
            if self._settings.copies:
                self.finder = CopyFinder.of(source, target)
            self.groups = self._empty_groups()
        self.finder.update(source, target)
        # 3. Features and targets carry no RoPE.
        features = DocumentStates(self._ropes[0].strip_cache(source), {})
        targets = DocumentStates(self._ropes[1].strip_cache(target), hidden, weights)
        if hidden and not self.num_documents:
            check_projections(projections(self._models[1]), hidden, targets.cache)
        for group in self.groups:
            group.update(features, targets, is_held_out(self.num_documents))
        self.num_documents, self.num_tokens = self.num_documents + 1, self.num_tokens + len(ids)

    def state(self) -> CheckpointState:
        return CheckpointState.of(
            self._accumulators, self.finder.facts(), self.num_documents, self.num_tokens, self.digest
        )

    def restore(self, state: CheckpointState) -> None:
        self.finder = CopyFinder.from_facts(state.facts["copies"])
        self.groups = self._empty_groups()
        state.fill(self._accumulators)
        self.num_documents, self.num_tokens, self.digest = state.num_documents, state.num_tokens, state.digest

    @property
    def _accumulators(self) -> list[RowAccumulator]:
        return [accumulator for group in self.groups for accumulator in (group.train, group.held_out)]

    def _empty_groups(self) -> list[FeatureGroup]:
        settings = self._settings
        source, target = (geometry_of(model.config) for model in self._models)
        layout = Layout.between(source, target)
        if settings.hidden:
            layout = Layout(source.num_kv_heads, source.head_dim, 1, self._models[1].config.hidden_size)
        groups = [
            (kinds, settings.wanted(kinds, target.num_layers, self.finder.copies)) for kinds in settings.feature_kinds
        ]
        groups = [(kinds, targets) for kinds, targets in groups if targets]
        if not groups:
            return []
        max_rows = max_buffered_rows([_group_size(*group, source, layout.target_width) for group in groups])
        return [FeatureGroup(*group, source, layout, self._models[0].device, max_rows) for group in groups]


class CopyFinder:
    """Finds target layers whose keys or values equal those of a source layer, as when a pruned sibling keeps them.

    `copies` gives the source layer of each such target, found in the first document and verified on all others.
    Copied layers need no fit, no weights and no multiplications.
    """

    def __init__(self, copies: dict[Target, int]):
        self.copies = copies
        self.lost = dict.fromkeys(copies, 0.0)  # sum of squared differences
        self.power = dict.fromkeys(copies, 0.0)  # sum of squares

    @classmethod
    def of(cls, first_source: KVCache, first_target: KVCache) -> CopyFinder:
        """Search the last tokens of the first document's caches for equal layers."""
        begin = max(0, first_source.num_tokens - COPY_SAMPLE_TOKENS)
        end = first_source.num_tokens
        return cls(_equal_layers(first_source.slice(begin, end), first_target.slice(begin, end)))

    @classmethod
    def from_facts(cls, facts: Sequence[tuple[Kind, int, int, float, float]]) -> CopyFinder:
        """Restore what `facts` returned."""
        finder = cls({(kind, layer): source for kind, layer, source, _, _ in facts})
        for kind, layer, _, lost, power in facts:
            finder.lost[kind, layer], finder.power[kind, layer] = lost, power
        return finder

    def facts(self) -> list[tuple[Kind, int, int, float, float]]:
        """Return everything as JSON values."""
        return [
            (kind, layer, source, self.lost[kind, layer], self.power[kind, layer])
            for (kind, layer), source in self.copies.items()
        ]

    def update(self, source: KVCache, target: KVCache) -> None:
        for (kind, layer), source_layer in self.copies.items():
            wanted, copied = target.of(kind)[layer], source.of(kind)[source_layer]
            self.lost[kind, layer] += float((wanted - copied).float().square().sum())
            self.power[kind, layer] += float(wanted.float().square().sum())

    def confirm(self) -> None:
        """Raise `MapperError` if a layer that was a copy in the first document differs over all documents."""
        for (kind, layer), source_layer in self.copies.items():
            error = (self.lost[kind, layer] / max(self.power[kind, layer], 1e-300)) ** 0.5
            if error > COPY_TOLERANCE:
                raise MapperError(
                    f"the {kind} of target layer {layer} equal those of source layer {source_layer} in the first "
                    f"document, but differ by {error:.1e} over all; allowed: copies=False (kvrelay fit --no-copies)"
                )


def _equal_layers(source: KVCache, target: KVCache) -> dict[Target, int]:
    if source.keys[0].shape != target.keys[0].shape:
        return {}
    found: dict[Target, int] = {}
    for kind in KINDS:
        for layer, states in enumerate(target.of(kind)):
            errors = [_relative_error(states, candidate) for candidate in source.of(kind)]
            best = min(range(len(errors)), key=errors.__getitem__)
            if errors[best] < COPY_TOLERANCE:
                found[kind, layer] = best
    return found


def _relative_error(states: Tensor, candidate: Tensor) -> float:
    return float((states - candidate).norm() / states.norm().clamp_min(1e-30))


@contextmanager
def defer_interrupts() -> Iterator[None]:
    """Deliver SIGINT after the block, to the handler that was installed before it. An ignored one stays ignored.

    Does nothing in a thread other than the main one, which signals never interrupt.
    """
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: received.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if received:
            signal.raise_signal(signal.SIGINT)
