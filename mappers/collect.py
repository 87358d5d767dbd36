"""Reads documents with both models and keeps only statistics of what their caches hold.

One Gram over the features of all source layers, and their cross-moments with all target layers: which layers to use,
how many, and with what penalty are then linear algebra on sub-blocks, with no second pass over the data.
"""

from __future__ import annotations

import hashlib
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from mappers.attention import EFFECTIVE_SHARE, AttentionReceived, Weighting, shrunk, watched
from mappers.cache import KVCache, KVGeometry, rows_of
from mappers.checkpoint import Checkpoint, CheckpointState
from mappers.copies import CopyFinder
from mappers.errors import CalibrationTooSmall, CheckpointMismatch, DataUnreadable
from mappers.manifest import KINDS, Block, Kind, Target
from mappers.methods import Layout
from mappers.methods.hidden import check_projections, listened, projections
from mappers.model_config import context_of, geometry_of
from mappers.models import read
from mappers.rope import Rope
from mappers.stats import BATCH, Moments, RowAccumulator

HELD_OUT_EVERY = 8  # documents; the second is the first that is held out
MAX_DOCUMENT_TOKENS = 2048
SAMPLE_DOCUMENTS, SAMPLE_TOKENS = 4, 512  # held-out documents, and tokens of each, that are kept to be read again
ROWS_BYTES = 2**30  # of features and targets that are held as they are before they become moments, at most

Wanted = tuple[Literal["keys", "values", "hidden"], int]  # of a target layer: keys, values, what they are made from
Progress = Callable[[int, int | None], None]  # tokens done, tokens to do if known


@dataclass(frozen=True)
class Reading:
    """What is gathered from the documents.

    `joint`: keys and values are one set of features. `copies`: layers that the models share are passed by. The first
    `head` tokens of each document count for nothing: they are attention sinks of enormous norm, and are read natively
    when the map is used. `hidden`: what is to be predicted are the target's normed hidden states, from which it makes
    its keys and values. For `weighting` and `effective_share` see `mappers.attention`.
    """

    joint: bool = False
    copies: bool = True
    head: int = 4
    hidden: bool = False
    weighting: Weighting = "uniform"
    effective_share: float = EFFECTIVE_SHARE

    @property
    def together(self) -> list[tuple[Kind, ...]]:
        """Kinds of features that serve the same targets."""
        return [KINDS] if self.joint or self.hidden else [("keys",), ("values",)]

    def wanted(self, kinds: tuple[Kind, ...], num_layers: int, copies: dict[Target, int]) -> list[Wanted]:
        """What is to be predicted from features of these kinds."""
        layers = range(num_layers)
        if self.hidden:
            return [("hidden", i) for i in layers if not all((kind, i) in copies for kind in KINDS)]
        return [(kind, i) for kind in kinds for i in layers if (kind, i) not in copies]


@dataclass(frozen=True)
class States:
    """What a model makes of a document, the head left out: its cache, normed hidden states of each layer (T, hidden) if
    asked for, and how much each token counts (T,)."""

    cache: KVCache
    hidden: dict[int, Tensor]
    weights: Tensor | None = None

    def rows(self, wanted: Wanted) -> Tensor:
        """(T, width)."""
        kind, layer = wanted
        return self.hidden[layer] if kind == "hidden" else rows_of(self.cache.of(kind)[layer])


class Group:
    """Targets that share their features: `kinds` of all source layers, (kind, layer, head, dim) a column each.

    When there are more than `most_rows` rows, they are folded to moments.
    """

    def __init__(
        self,
        kinds: tuple[Kind, ...],
        targets: Sequence[Wanted],
        source: KVGeometry,
        layout: Layout,
        device: Any,
        most_rows: int,
    ):
        self.kinds, self.targets, self.source, self.layout = kinds, list(targets), source, layout
        self.device, self._most_rows = device, most_rows
        self.blocks: list[Block] = [(kind, layer) for kind in kinds for layer in range(source.num_layers)]
        sizes = _sizes(kinds, targets, source, layout.target_width)
        self.train, self.held_out = RowAccumulator(*sizes, device), RowAccumulator(*sizes, device)

    def features(self, blocks: Sequence[Block]) -> Tensor:
        """Columns of these blocks, in their order."""
        width = self.source.width
        starts = [self.blocks.index(block) * width for block in blocks]
        return torch.cat([torch.arange(s, s + width) for s in starts]).to(self.device)

    def outputs(self, index: int) -> Tensor:
        """Columns of `targets[index]`."""
        width = self.layout.target_width
        return torch.arange(index * width, (index + 1) * width, device=self.device)

    def update(self, source: States, target: States, held_out: bool) -> None:
        """Take in one document; its keys carry no position."""
        x = torch.cat([source.rows(block) for block in self.blocks], dim=1)
        y = torch.cat([target.rows(wanted) for wanted in self.targets], dim=1)
        if self.train.moments is None and self.train.count + self.held_out.count + len(x) > self._most_rows:
            self.fold()
        (self.held_out if held_out else self.train).update(x, y, target.weights)

    def fold(self) -> None:
        """Make moments of all rows."""
        for gathered in (self.train, self.held_out):
            gathered.fold()


@dataclass(frozen=True)
class CalibrationStatistics:
    """All that is known of the calibration data once it has been read. `sample` is some of what was held out.

    `reading_s` is how long the two models took to read what this call had them read.
    """

    groups: list[Group]
    copies: dict[Target, int]
    num_documents: int
    num_tokens: int
    digest: str
    sample: list[list[int]]
    reading_s: float


@torch.no_grad()
def collect(
    models: tuple[Any, Any],
    ropes: tuple[Rope, Rope],
    documents: Iterable[Sequence[int]],
    reading: Reading,
    *,
    max_tokens: int | None = None,
    progress: Progress | None = None,
    checkpoint: Checkpoint | None = None,
) -> CalibrationStatistics:
    """Read documents, up to `max_tokens` tokens, with source and target.

    What a `checkpoint` holds is not read again. It also gets what was read before an interrupt, or before documents
    that can't be read. Raises `CheckpointMismatch` if it is of other documents, or of more tokens.
    """
    # 1. Where an earlier run was stopped.
    longest = longest_of(model.config for model in models)
    stream = _Stream(usable(documents, reading.head, longest))
    collector = _Collector(models, ropes, reading)
    saved = checkpoint.load() if checkpoint else None
    if saved:
        collector.restore(saved)
        stream.skip(saved.num_documents)
        saved.check_documents(stream.digest)
        if max_tokens is not None and saved.num_tokens - stream.num_last >= max_tokens:
            raise CheckpointMismatch(f"the checkpoint holds {saved.num_tokens} tokens, more than {max_tokens}")
    # 2. Every document adds to the statistics.
    num_saved = collector.num_documents
    try:
        while (max_tokens is None or collector.num_tokens < max_tokens) and (ids := stream.next()):
            collector.take(ids, stream.digest)
            if progress:
                progress(collector.num_tokens, max_tokens)
            if checkpoint and checkpoint.due:
                checkpoint.save(collector.saved())
                num_saved = collector.num_documents
    except (KeyboardInterrupt, DataUnreadable):
        if checkpoint and collector.num_documents > num_saved:
            checkpoint.save(collector.saved())
        raise
    if checkpoint and checkpoint.is_due_at_end and collector.num_documents > num_saved:
        checkpoint.save(collector.saved())
    # 3. What looked like a copy must have been one throughout.
    collector.finder.confirm()
    if not collector.num_documents:
        raise CalibrationTooSmall(f"no document of more than {reading.head + 1} tokens")
    return CalibrationStatistics(
        collector.groups,
        collector.finder.copies,
        collector.num_documents,
        collector.num_tokens,
        collector.digest,
        stream.sample,
        collector.reading_s,
    )


def planned_bytes(
    source: KVGeometry, target: KVGeometry, reading: Reading, hidden_size: int = 0, max_tokens: int | None = None
) -> int:
    """Memory that the statistics, and the rows before them, take at most (layers that turn out to be copies need
    none)."""
    width = hidden_size if reading.hidden else target.width
    wanted = [(kinds, reading.wanted(kinds, target.num_layers, {})) for kinds in reading.together]
    sizes = [_sizes(*each, source, width) for each in wanted]
    rows = most_rows(sizes)
    if max_tokens is not None:
        rows = min(rows, max_tokens + MAX_DOCUMENT_TOKENS)
    return _moments_bytes(sizes) + rows * _row_bytes(sizes)


def most_rows(sizes: Sequence[tuple[int, int]]) -> int:
    """How many rows are held before they become moments, of groups of so many features and targets: as many as take
    less than the moments will."""
    return max(min(ROWS_BYTES, _moments_bytes(sizes)) // _row_bytes(sizes), 2 * BATCH)


def _row_bytes(sizes: Sequence[tuple[int, int]]) -> int:
    return sum(RowAccumulator.bytes_for(*size) for size in sizes)


def _moments_bytes(sizes: Sequence[tuple[int, int]]) -> int:
    return sum(2 * Moments.bytes_for(*size) for size in sizes)


def _sizes(kinds: Sequence[Kind], targets: Sequence[Wanted], source: KVGeometry, target_width: int) -> tuple[int, int]:
    """Features and targets of a group."""
    return len(kinds) * source.num_layers * source.width, len(targets) * target_width


def usable(documents: Iterable[Sequence[int]], head: int, longest: int) -> Iterator[list[int]]:
    """Those that leave something behind the head, each cut to `longest` tokens."""
    return (list(ids[:longest]) for ids in documents if len(ids) > head + 1)


def longest_of(configs: Iterable[Any]) -> int:
    """How many tokens of a document are read, by models of these configs."""
    return min(MAX_DOCUMENT_TOKENS, *map(context_of, configs))


def rows_to_fit(lengths: Iterable[int], reading: Reading) -> int:
    """How many rows documents of such lengths give to fit by: of those that are not held out, without the head. With
    weights they tell as much as fewer equal ones."""
    return sum(length - reading.head for index, length in enumerate(lengths) if not is_held_out(index))


class _Stream:
    """Documents one after another; the last one had `num_last` tokens."""

    def __init__(self, documents: Iterator[list[int]]):
        self._rest = documents
        self._digest = hashlib.sha256()
        self._num_read = self.num_last = 0
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
        if is_held_out(self._num_read) and len(self.sample) < SAMPLE_DOCUMENTS:
            self.sample.append(ids[:SAMPLE_TOKENS])
        self._num_read, self.num_last = self._num_read + 1, len(ids)
        return ids

    def skip(self, num_documents: int) -> None:
        for _ in range(num_documents):
            self.next()


class _Collector:
    """The statistics of what was read so far. The first document tells which layers are copies, and so what is to be
    fitted."""

    def __init__(self, models: tuple[Any, Any], ropes: tuple[Rope, Rope], reading: Reading):
        self._models, self._ropes, self._reading = models, ropes, reading
        self.groups: list[Group] = []
        self.finder = CopyFinder({})
        self.num_documents = self.num_tokens = 0
        self.digest = ""
        self.reading_s = 0.0

    def take(self, ids: list[int], digest: str) -> None:
        """Read one more document; `digest` is that of all so far. An interrupt finds it taken in whole, or not at
        all."""
        began = time.perf_counter()
        theirs, ours = States(read(self._models[0], ids), {}), self._read_target(ids)
        self.reading_s += time.perf_counter() - began
        with put_off():
            self._add(ids, theirs, ours)
            self.digest = digest

    def _add(self, ids: list[int], theirs: States, ours: States) -> None:
        head = self._reading.head
        source, target = theirs.cache.slice(head, len(ids)), ours.cache.slice(head, len(ids))
        if not self.num_documents:
            if self._reading.copies:
                self.finder = CopyFinder.of(source, target)
            self.groups = self._groups(self.finder.copies)
        self.finder.update(source, target)
        theirs = States(self._ropes[0].stripped(source), {})
        hidden = {layer: states[head:] for layer, states in ours.hidden.items()}
        ours = States(self._ropes[1].stripped(target), hidden, self._weights(ours.weights))
        if hidden and not self.num_documents:
            check_projections(projections(self._models[1]), hidden, ours.cache)
        for group in self.groups:
            group.update(theirs, ours, is_held_out(self.num_documents))
        self.num_documents, self.num_tokens = self.num_documents + 1, self.num_tokens + len(ids)

    def saved(self) -> CheckpointState:
        """All of it, to go on from later."""
        return CheckpointState.of(self._gathered, self.finder, self.num_documents, self.num_tokens, self.digest)

    def restore(self, saved: CheckpointState) -> None:
        self.finder = saved.finder()
        self.groups = self._groups(self.finder.copies)
        saved.fill(self._gathered)
        self.num_documents, self.num_tokens, self.digest = saved.num_documents, saved.num_tokens, saved.digest

    @property
    def _gathered(self) -> list[RowAccumulator]:
        return [gathered for group in self.groups for gathered in (group.train, group.held_out)]

    def _groups(self, copies: dict[Target, int]) -> list[Group]:
        source, target = (geometry_of(model.config) for model in self._models)
        layout = Layout(source.num_kv_heads, source.head_dim, target.num_kv_heads, target.head_dim)
        if self._reading.hidden:
            layout = Layout(source.num_kv_heads, source.head_dim, 1, self._models[1].config.hidden_size)
        wanted = [(kinds, self._reading.wanted(kinds, target.num_layers, copies)) for kinds in self._reading.together]
        wanted = [(kinds, targets) for kinds, targets in wanted if targets]
        if not wanted:
            return []
        most = most_rows([_sizes(*each, source, layout.target_width) for each in wanted])
        return [Group(*each, source, layout, self._models[0].device, most) for each in wanted]

    def _read_target(self, ids: list[int]) -> States:
        model = self._models[1]
        received = AttentionReceived(len(ids), model.device)
        hidden: dict[int, Tensor] = {}
        with ExitStack() as listening:
            if self._reading.weighting == "attention":
                listening.enter_context(watched(model, received))
            if self._reading.hidden:
                hidden = listening.enter_context(listened(model))
            cache = read(model, ids)
        return States(cache, hidden, received.mean())

    def _weights(self, received: Tensor | None) -> Tensor | None:
        """How much each token behind the head counts."""
        if received is None or self._reading.weighting == "uniform":
            return None
        return shrunk(received[self._reading.head :], self._reading.effective_share)


def is_held_out(document: int) -> bool:
    """Whether the document of this index is kept to choose by."""
    return document % HELD_OUT_EVERY == 1


@contextmanager
def put_off() -> Iterator[None]:
    """SIGINT is heard when the block ends, by whoever would have heard it; one that is ignored still is.

    In a thread other than the main one this changes nothing: signals never interrupt it.
    """
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    heard: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: heard.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if heard:
            signal.raise_signal(signal.SIGINT)
