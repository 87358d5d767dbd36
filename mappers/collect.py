"""Reads documents with both models and keeps only statistics of what their caches hold.

One Gram over the features of all source layers, and their cross-moments with all target layers: which layers to use,
how many, and with what penalty are then linear algebra on sub-blocks, with no second pass over the data.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from mappers.cache import KVCache, KVGeometry
from mappers.errors import CalibrationTooSmall
from mappers.exact import CopyFinder, Target
from mappers.manifest import KINDS, Kind
from mappers.models import read
from mappers.rope import Rope
from mappers.stats import Moments

HELD_OUT_EVERY = 8  # documents; the second is the first that is held out
MAX_DOCUMENT_TOKENS = 2048

Progress = Callable[[int, int | None], None]  # tokens done, tokens to do if known


class Group:
    """Target layers that share their features: `kinds` of all source layers, (kind, layer, head, dim) a column each."""

    def __init__(
        self, kinds: tuple[Kind, ...], targets: list[Target], source: KVGeometry, target: KVGeometry, device: Any
    ):
        self.kinds, self.targets, self.source, self.target = kinds, targets, source, target
        sizes = (len(kinds) * source.num_layers * source.width, len(targets) * target.width)
        self.train, self.held_out = Moments(*sizes, device), Moments(*sizes, device)

    def features(self, layers: Sequence[int]) -> Tensor:
        """Columns of these source layers, for each kind in turn; layers ascending."""
        width = self.source.width
        starts = [(k * self.source.num_layers + i) * width for k in range(len(self.kinds)) for i in layers]
        return torch.cat([torch.arange(s, s + width) for s in starts]).to(self.train.xx.device)

    def outputs(self, index: int) -> Tensor:
        """Columns of `targets[index]`."""
        width = self.target.width
        return torch.arange(index * width, (index + 1) * width, device=self.train.xx.device)

    def update(self, source: KVCache, target: KVCache, held_out: bool) -> None:
        """Take in position-free caches of one document."""
        x = torch.cat([_rows(states) for kind in self.kinds for states in source.of(kind)], dim=1)
        y = torch.cat([_rows(target.of(kind)[layer]) for kind, layer in self.targets], dim=1)
        (self.held_out if held_out else self.train).update(x, y)


@dataclass(frozen=True)
class Collected:
    """All that is known of the calibration data once it has been read."""

    groups: list[Group]
    copies: dict[Target, int]
    num_documents: int
    num_tokens: int
    digest: str


@torch.no_grad()
def collect(
    models: tuple[Any, Any],
    ropes: tuple[Rope, Rope],
    documents: Iterable[Sequence[int]],
    *,
    joint: bool,
    copies: bool,
    head: int,
    max_tokens: int | None = None,
    progress: Progress | None = None,
) -> Collected:
    """Read documents, up to `max_tokens` tokens, with source and target.

    The first `head` tokens of each count for nothing: they are attention sinks of enormous norm, and are read natively
    when the map is used.
    """
    # 1. The first document tells which layers are copies, and so what is to be fitted.
    usable = (list(ids[:MAX_DOCUMENT_TOKENS]) for ids in documents if len(ids) > head + 1)
    first = next(usable, None)
    if first is None:
        raise CalibrationTooSmall(f"no document of more than {head + 1} tokens")
    theirs, ours = _read_both(models, first, head)
    finder = CopyFinder(theirs, ours) if copies else None
    groups = _groups(joint, finder.copies if finder else {}, theirs.geometry, ours.geometry, models[0].device)
    # 2. Every document adds to the statistics.
    digest, num_documents, num_tokens = hashlib.sha256(), 0, 0
    for ids in chain([first], usable):
        theirs, ours = _read_both(models, ids, head)
        if finder:
            finder.update(theirs, ours)
        theirs, ours = ropes[0].stripped(theirs), ropes[1].stripped(ours)
        for group in groups:
            group.update(theirs, ours, held_out=num_documents % HELD_OUT_EVERY == 1)
        digest.update(len(ids).to_bytes(4, "little") + b"".join(i.to_bytes(4, "little") for i in ids))
        num_documents, num_tokens = num_documents + 1, num_tokens + len(ids)
        if progress:
            progress(num_tokens, max_tokens)
        if max_tokens is not None and num_tokens >= max_tokens:
            break
    # 3. What looked like a copy must have been one throughout.
    if finder:
        finder.confirm()
    return Collected(groups, finder.copies if finder else {}, num_documents, num_tokens, digest.hexdigest())


def planned_bytes(source: KVGeometry, target: KVGeometry, joint: bool) -> int:
    """Memory that the statistics take at most (layers that turn out to be copies need none)."""
    parts = 2 if joint else 1
    features, targets = parts * source.num_layers * source.width, parts * target.num_layers * target.width
    return 2 * (2 // parts) * Moments.bytes_for(features, targets)


def _groups(joint: bool, copies: dict[Target, int], source: KVGeometry, target: KVGeometry, device: Any) -> list[Group]:
    together: list[tuple[Kind, ...]] = [KINDS] if joint else [("keys",), ("values",)]
    groups = []
    for kinds in together:
        targets: list[Target] = [(k, i) for k in kinds for i in range(target.num_layers) if (k, i) not in copies]
        if targets:
            groups.append(Group(kinds, targets, source, target, device))
    return groups


def _read_both(models: tuple[Any, Any], ids: Sequence[int], head: int) -> tuple[KVCache, KVCache]:
    return read(models[0], ids).slice(head, len(ids)), read(models[1], ids).slice(head, len(ids))


def _rows(states: Tensor) -> Tensor:
    """(H, T, D) as (T, H * D)."""
    return states.transpose(0, 1).flatten(1)
