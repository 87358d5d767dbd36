"""`Reader`: another worker's pool, opened for reading. `Transport`: opens them.

What is read is one content if the generations say so twice:

    look ── all even, all as in the ticket ──► read ──► look again ── unchanged ──► what was read is one content
              otherwise CacheStale                          otherwise CacheStale, and what was read is worthless

A new transport is one file with an `open`, and one line in the registry.
"""

from __future__ import annotations

import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from mappers.cache import KVCache
from workers.api.errors import CacheStale, DeadlineExceeded, InvalidRequest, TransferFailed
from workers.api.schemas import KVLayout, PoolExport, Site
from workers.pool.blocks import (
    BlockSpan,
    block_bytes,
    blocks_for,
    cache_in,
    cache_shape,
    check_blocks,
    check_range,
    torch_dtype,
)
from workers.pool.segment import Generations, Header


class CopyBuffer:
    """Memory for copies out of one pool, kept from one to the next and grown for a longer one."""

    def __init__(self) -> None:
        self._memory = torch.empty(0)

    @property
    def num_bytes(self) -> int:
        return self._memory.nbytes

    def take(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> Tensor:
        """Uninitialised; the next call gives the same memory again. `dtype` and `device` are the pool's, always."""
        count = math.prod(shape)
        if self._memory.numel() < count:
            self._memory = torch.empty(count, dtype=dtype, device=device)
        return self._memory[:count].view(tuple(shape))


class Reader(ABC):
    """A peer's blocks. Safe from any thread; a close waits for the read that runs."""

    waits: ClassVar[bool] = False  # whether a read waits for a network: then it goes on a thread that may wait

    def __init__(self, export: PoolExport, layout: KVLayout, device: torch.device | str):
        self.export = export
        self.layout = layout
        self._device = device
        self._closed = False
        self._lock = threading.Lock()
        self._local = threading.local()

    @contextmanager
    def reading(
        self,
        blocks: Sequence[int],
        generations: Sequence[int],
        begin: int,
        end: int,
        *,
        deadline: float = math.inf,
        room: CopyBuffer | None = None,
    ) -> Iterator[BlockSpan]:
        """Tokens `[begin, end)` of the sequence in `blocks`, where they lie.

        What is read of them inside is one content if the end is reached; `CacheStale` there says that it may be torn,
        and must be thrown away with all that was made of it. A reader that `waits` brings them into `room` first: there
        they stand until it is taken again.

        `generations` are the ticket's, one a block. `CacheStale` if a block was freed or written since, or while it was
        read; `TransferFailed` for blocks that the pool lacks, and where the way to them fails; `DeadlineExceeded` at
        `deadline`, an instant of `time.monotonic()`.
        """
        size = self.layout.block_tokens
        check_blocks(blocks, self.export.num_blocks, TransferFailed)
        check_range(blocks, begin, end, size)
        touched = slice(begin // size, blocks_for(end, size))
        with self._alone(deadline):
            if self._closed:
                raise CacheStale(f"the pool of epoch {self.export.epoch} has been closed here")
            with self._lent(blocks[touched], generations[touched], deadline, room or CopyBuffer()) as (data, places):
                yield BlockSpan(data, places, begin % size, end - begin, begin)

    def read(
        self, blocks: Sequence[int], generations: Sequence[int], begin: int, end: int, *, deadline: float = math.inf
    ) -> KVCache:
        """The same, copied out in the pool's dtype: views `(H, T, D)` of token-major memory that stand until this
        thread's next `read`. Errors as `reading`."""
        with self.reading(blocks, generations, begin, end, deadline=deadline) as span:
            shape = cache_shape(self.layout, end - begin)
            copy = cache_in(self._own_room().take(shape, torch_dtype(self.layout.dtype), self._device), begin)
            span.copy_out(copy)
        return copy

    def alive(self) -> bool:
        """Whether the pool's owner still runs and has its pool open."""
        return not self._closed and self._owner_alive()

    def close(self) -> None:
        """Give up the mapping. Idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._local = threading.local()
                self._unmap()

    @abstractmethod
    def _lent(
        self, blocks: Sequence[int], generations: Sequence[int], deadline: float, room: CopyBuffer
    ) -> AbstractContextManager[tuple[Tensor, Sequence[int]]]:
        """These blocks, all of which are in the pool: memory `(..., L, 2, block_tokens, H, D)`, and where in it they
        are. Their generations are looked at before and after what is done with them."""

    def _owner_alive(self) -> bool:
        return True

    def _unmap(self) -> None:  # noqa: B027 - some have nothing to give back
        """Give back what `open` took."""

    @contextmanager
    def _alone(self, deadline: float) -> Iterator[None]:
        left_s = -1 if math.isinf(deadline) else max(0.0, deadline - time.monotonic())
        if not self._lock.acquire(timeout=left_s):
            raise DeadlineExceeded("the deadline passed while another read of the same pool went on")
        try:
            yield
        finally:
            self._lock.release()

    def _own_room(self) -> CopyBuffer:
        if not hasattr(self._local, "room"):
            self._local.room = CopyBuffer()
        room: CopyBuffer = self._local.room
        return room


class MemoryReader(Reader):
    """A peer's blocks and generations in memory that this process sees."""

    def __init__(self, export: PoolExport, layout: KVLayout, data: Tensor, generations: Generations):
        super().__init__(export, layout, data.device)
        self._data = data  # (num_blocks, L, 2, block_tokens, H, D)
        self._generations = generations

    @contextmanager
    def _lent(
        self, blocks: Sequence[int], generations: Sequence[int], deadline: float, room: CopyBuffer
    ) -> Iterator[tuple[Tensor, Sequence[int]]]:
        check_generations(self._generations, blocks, generations)
        yield self._data, blocks
        self._synchronize()
        check_generations(self._generations, blocks, generations)

    def _unmap(self) -> None:
        self._data = self._data.new_empty(0)

    def _synchronize(self) -> None:
        """Wait until what was read has arrived."""


def check_generations(now: Generations, blocks: Sequence[int], expected: Sequence[int]) -> None:
    """Raise `CacheStale` unless these blocks stand, each at the generation that its ticket says."""
    wanted = np.asarray(expected, dtype=np.int64)
    found = now[np.asarray(blocks, dtype=np.int64)]
    wrong = np.flatnonzero((found != wanted) | (found & 1).astype(bool))
    if wrong.size:
        at = int(wrong[0])
        raise CacheStale(
            f"block {blocks[at]} is at generation {found[at]}, its ticket says {wanted[at]}: "
            "it was written or freed since"
        )


class Transport(ABC):
    """Opens the pools of one kind."""

    kind: ClassVar[str]

    @classmethod
    def create(cls, secret: str) -> Transport:
        """As a worker uses it. `secret` is the cluster's, for those that must prove that they know it."""
        return cls()

    @staticmethod
    @abstractmethod
    def reaches(export: PoolExport, site: Site) -> bool:
        """Whether a worker at `site` can open that pool, as far as the two can tell without trying."""

    @abstractmethod
    def open(self, export: PoolExport, layout: KVLayout, *, deadline: float = math.inf) -> Reader:
        """Open the pool, read-only. `CacheStale` when it is gone or of another epoch, `TransferFailed` when it can't be
        read from here or is not what `export` and `layout` say, `DeadlineExceeded` at `deadline`."""


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
