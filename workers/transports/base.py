"""`Reader`: another worker's pool, opened for reading. `Transport`: opens them.

A read is a copy between two looks at the generations:

    look ── all even, all as in the ticket ──► copy ──► look again ── unchanged ──► the copy is one content
              otherwise CacheStale                          otherwise CacheStale, and the copy is worthless

A new transport is one file with an `open`, and one line in the registry.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from mappers.cache import KVCache
from workers.api.errors import CacheStale, InvalidRequest, TransferFailed
from workers.api.schemas import KVLayout, PoolExport
from workers.pool.blocks import block_bytes, check_blocks, check_range, copy_out, empty_cache
from workers.pool.segment import Generations, Header


class Reader:
    """A peer's blocks and generations. Safe from any thread; a close waits for the read that runs."""

    def __init__(self, export: PoolExport, layout: KVLayout, data: Tensor, generations: Generations):
        self.export = export
        self.layout = layout
        self._data: Tensor | None = data  # (num_blocks, L, 2, block_tokens, H, D)
        self._generations = generations
        self._lock = threading.Lock()
        self._local = threading.local()

    def read(self, blocks: Sequence[int], generations: Sequence[int], begin: int, end: int) -> KVCache:
        """Tokens `[begin, end)` of the sequence in `blocks`, copied out in the pool's dtype, on the pool's device, as
        views `(H, T, D)` of token-major memory that stand until this thread's next read.

        `generations` are the ticket's, one a block. `CacheStale` if a block was freed or written since, or while it was
        copied; `TransferFailed` for blocks that the pool lacks.
        """
        check_blocks(blocks, self.export.num_blocks, TransferFailed)
        size = self.layout.block_tokens
        check_range(blocks, begin, end, size)
        touched = slice(begin // size, -(-end // size))
        with self._lock:
            if self._data is None:
                raise CacheStale(f"the pool of epoch {self.export.epoch} has been closed here")
            self._check(blocks[touched], generations[touched])
            copy = self._staging(begin, end, self._data.device)
            copy_out(self._data, blocks, copy)
            self._synchronize()
            self._check(blocks[touched], generations[touched])
        return copy

    def alive(self) -> bool:
        """Whether the pool's owner still runs and has its pool open."""
        return self._data is not None and self._owner_alive()

    def close(self) -> None:
        """Give up the mapping. Idempotent."""
        with self._lock:
            if self._data is not None:
                self._data = None
                self._local = threading.local()
                self._unmap()

    def _staging(self, begin: int, end: int, device: torch.device) -> KVCache:
        """Room for a copy: this thread's own, kept from chunk to chunk and grown for a longer one."""
        room: KVCache | None = getattr(self._local, "room", None)
        if room is None or room.num_tokens < end - begin:
            room = self._local.room = empty_cache(self.layout, 0, end - begin, device)
        part = room.slice(0, end - begin)
        return KVCache(part.keys, part.values, begin)

    def _owner_alive(self) -> bool:
        return True

    def _unmap(self) -> None:
        """Give back what `open` took."""

    def _synchronize(self) -> None:
        """Wait until the copy is done."""

    def _check(self, blocks: Sequence[int], generations: Sequence[int]) -> None:
        expected = np.asarray(generations, dtype=np.int64)
        found = self._generations[np.asarray(blocks, dtype=np.int64)]
        wrong = np.flatnonzero((found != expected) | (found & 1).astype(bool))
        if wrong.size:
            at = int(wrong[0])
            raise CacheStale(
                f"block {blocks[at]} is at generation {found[at]}, its ticket says {expected[at]}: "
                "it was written or freed since"
            )


class Transport(ABC):
    """Opens the pools of one kind."""

    kind: ClassVar[str]

    @abstractmethod
    def open(self, export: PoolExport, layout: KVLayout) -> Reader:
        """Map the pool, read-only. `CacheStale` when it is gone or of another epoch, `TransferFailed` when it can't be
        read from here or is not what `export` and `layout` say."""


def text_at(export: PoolExport, key: str) -> str:
    """A text field of the pool's address."""
    value = export.address.get(key)
    if not isinstance(value, str):
        raise TransferFailed(f"the address of a {export.kind} pool needs a text {key!r}; got {value!r}")
    return value


def check_header(header: Header, export: PoolExport, layout: KVLayout, *, blocks_inside: bool) -> None:
    """The pool's file must be the one that the ticket speaks of."""
    if header.epoch != export.epoch:
        raise CacheStale(f"the pool is of epoch {header.epoch}, its ticket of {export.epoch}")
    expected = (export.num_blocks, block_bytes(layout) if blocks_inside else 0)
    if (header.num_blocks, header.block_bytes) != expected:
        raise TransferFailed(
            f"the pool has {header.num_blocks} blocks of {header.block_bytes} bytes; its ticket says "
            f"{expected[0]} of {expected[1]}"
        )


def check_layout(layout: KVLayout) -> None:
    """Every extent must be positive: a layout comes from another process."""
    extents = (layout.num_layers, layout.num_kv_heads, layout.head_dim, layout.block_tokens)
    if min(extents) < 1:
        raise InvalidRequest(f"a KV layout's extents must be positive; got {layout}", param="layout")
