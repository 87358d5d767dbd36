"""`Reader`: another worker's pool, opened for reading. `Transport`: opens pools of one kind.

A copy is consistent if the generations do not change while it is made:

    check ── all even, all as in the ticket ──► read ──► check ── unchanged ──► the copy is consistent
               otherwise CacheStale                        otherwise CacheStale, and the copy is worthless

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
    """Memory for copies from one pool, reused by each and grown for a longer one."""

    def __init__(self) -> None:
        self._memory = torch.empty(0)

    @property
    def num_bytes(self) -> int:
        return self._memory.nbytes

    def take(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> Tensor:
        """Return an uninitialised tensor; the next call returns the same memory. `dtype` and `device` never change."""
        count = math.prod(shape)
        if self._memory.numel() < count:
            self._memory = torch.empty(count, dtype=dtype, device=device)
        return self._memory[:count].view(tuple(shape))


class Reader(ABC):
    """A peer's blocks. Safe from any thread; `close` waits for a running read."""

    uses_network: ClassVar[bool] = False  # whether a read may wait for a network, and so needs a thread that may wait

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
        buffer: CopyBuffer | None = None,
    ) -> Iterator[BlockSpan]:
        """Yield tokens `[begin, end)` of the sequence in `blocks`, where they are stored.

        What the block reads is consistent if its end raises nothing. `CacheStale` at the end means that it may be torn:
        discard it and everything made of it. A reader that uses a network copies the tokens into `buffer` first, where
        they stay until the buffer is taken again.

        `generations` are the ticket's, one per block. Raises `CacheStale` if a block was freed or written since the
        ticket or while it is read, `TransferFailed` for blocks outside of the pool or if the transport fails,
        `DeadlineExceeded` at `deadline`, an instant of `time.monotonic()`.
        """
        size = self.layout.block_tokens
        check_blocks(blocks, self.export.num_blocks, TransferFailed)
        check_range(blocks, begin, end, size)
        touched = slice(begin // size, blocks_for(end, size))
        timeout_s = -1 if math.isinf(deadline) else max(0.0, deadline - time.monotonic())
        if not self._lock.acquire(timeout=timeout_s):
            raise DeadlineExceeded("the deadline passed during another read of the same pool")
        try:
            if self._closed:
                raise CacheStale(f"this worker has closed the pool of epoch {self.export.epoch}")
            buffer = buffer or CopyBuffer()
            with self._access(blocks[touched], generations[touched], deadline, buffer) as (data, places):
                yield BlockSpan(data, places, begin % size, end - begin, begin)
        finally:
            self._lock.release()

    def read(
        self, blocks: Sequence[int], generations: Sequence[int], begin: int, end: int, *, deadline: float = math.inf
    ) -> KVCache:
        """Copy out the tokens in the pool's dtype: views `(H, T, D)` of token-major memory, valid until this thread's
        next `read`. Raises what `reading` raises."""
        with self.reading(blocks, generations, begin, end, deadline=deadline) as span:
            if not hasattr(self._local, "buffer"):
                self._local.buffer = CopyBuffer()
            shape = cache_shape(self.layout, end - begin)
            memory = self._local.buffer.take(shape, torch_dtype(self.layout.dtype), self._device)
            copy = cache_in(memory, begin)
            span.copy_out(copy)
        return copy

    def alive(self) -> bool:
        """Return whether the pool's owner still runs and has its pool open."""
        return not self._closed and self._owner_alive()

    def close(self) -> None:
        """Unmap the pool. Idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._local = threading.local()
                self._unmap()

    @abstractmethod
    def _access(
        self, blocks: Sequence[int], generations: Sequence[int], deadline: float, buffer: CopyBuffer
    ) -> AbstractContextManager[tuple[Tensor, Sequence[int]]]:
        """Yield memory `(..., L, 2, block_tokens, H, D)` and the places of these blocks in it. Checks their generations
        before and after. All blocks are in the pool."""

    def _owner_alive(self) -> bool:
        return True

    def _unmap(self) -> None:  # noqa: B027 - some readers hold nothing
        """Release what `open` acquired."""


class MemoryReader(Reader):
    """A peer's blocks and generations in memory that this process can access."""

    def __init__(self, export: PoolExport, layout: KVLayout, data: Tensor, generations: Generations):
        super().__init__(export, layout, data.device)
        self._data = data  # (num_blocks, L, 2, block_tokens, H, D)
        self._generations = generations

    @contextmanager
    def _access(
        self, blocks: Sequence[int], generations: Sequence[int], deadline: float, buffer: CopyBuffer
    ) -> Iterator[tuple[Tensor, Sequence[int]]]:
        check_generations(self._generations, blocks, generations)
        yield self._data, blocks
        self._synchronize()
        check_generations(self._generations, blocks, generations)

    def _unmap(self) -> None:
        self._data = self._data.new_empty(0)

    def _synchronize(self) -> None:
        """Wait until the reads issued so far are done."""


def check_generations(current: Generations, blocks: Sequence[int], expected: Sequence[int]) -> None:
    """Raise `CacheStale` unless each block is valid and at the generation of its ticket."""
    wanted = np.asarray(expected, dtype=np.int64)
    found = current[np.asarray(blocks, dtype=np.int64)]
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
        """Create the transport for a worker. `secret` is the cluster's, for transports that authenticate."""
        return cls()

    @staticmethod
    @abstractmethod
    def reaches(export: PoolExport, site: Site) -> bool:
        """Return whether a worker at `site` can open that pool, as far as that is known without trying."""

    @abstractmethod
    def open(self, export: PoolExport, layout: KVLayout, *, deadline: float = math.inf) -> Reader:
        """Open the pool read-only. Raises `CacheStale` if it is gone or has another epoch, `TransferFailed` if it
        cannot be read from here or does not match `export` and `layout`, `DeadlineExceeded` at `deadline`."""


def text_at(export: PoolExport, key: str) -> str:
    """Return a text field of the pool's address."""
    value = export.address.get(key)
    if not isinstance(value, str):
        raise TransferFailed(f"the address of a {export.kind} pool needs a string {key!r}; got {value!r}")
    return value


def check_header(header: Header, export: PoolExport, layout: KVLayout, *, blocks_inside: bool) -> None:
    """Check that the pool's file is the one that the ticket names."""
    if header.epoch != export.epoch:
        raise CacheStale(f"the pool has epoch {header.epoch}, its ticket says {export.epoch}")
    expected = (export.num_blocks, block_bytes(layout) if blocks_inside else 0)
    if (header.num_blocks, header.block_bytes) != expected:
        raise TransferFailed(
            f"the pool has {header.num_blocks} blocks of {header.block_bytes} bytes; its ticket says "
            f"{expected[0]} of {expected[1]}"
        )


def check_layout(layout: KVLayout) -> None:
    """Check that every dimension is positive: a layout comes from another process."""
    dimensions = (layout.num_layers, layout.num_kv_heads, layout.head_dim, layout.block_tokens)
    if min(dimensions) < 1:
        raise InvalidRequest(f"the dimensions of a KV layout must be positive; got {layout}", param="layout")
