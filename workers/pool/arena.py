"""`Arena`: the memory of a pool's blocks and their generation counters. `PoolMemory`: copies between it and tensors.

    data         [num_blocks, num_layers, 2 (key, value), block_tokens, num_kv_heads, head_dim]
    generations  [num_blocks] int64

A block's generation is even while its content is valid and odd while it changes. It never decreases: a reader that sees
the same even number before and after a copy has copied consistent content. Only the pool's owner writes, one writer a
block; `writing` marks a write. A freed block stays odd from `open` until `clear` has zeroed it.

The order of plain loads and stores between two processes is that of x86-64 (total store order). On machines with a
weaker order, the lease protects a reader: leased blocks are not freed.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import ClassVar
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from mappers.cache import KVCache
from workers.api.errors import InvalidRequest, WorkerUnavailable
from workers.api.schemas import KVLayout, PoolExport
from workers.pool.blocks import (
    BlockSpan,
    block_bytes,
    block_shape,
    blocks_for,
    check_blocks,
    check_range,
    copy_in,
    copy_layers_in,
    copy_out,
    empty_cache,
    torch_dtype,
)
from workers.pool.segment import SHM, Generations, Header, Segment


class Arena(ABC):
    """Base of all arenas. `kind` is the name of the transport that reads it."""

    kind: ClassVar[str]

    def __init__(self, layout: KVLayout, data: Tensor, generations: Generations, epoch: str):
        self.layout = layout
        self.num_blocks = data.shape[0]
        self.data = data  # (num_blocks, L, 2, block_tokens, H, D)
        self.generations = generations
        self.epoch = epoch

    @property
    def block_bytes(self) -> int:
        return block_bytes(self.layout)

    @contextmanager
    def writing(self, blocks: Sequence[int]) -> Iterator[None]:
        """Mark a write to these blocks: their generations are odd inside the block, and two higher afterwards."""
        self.open(blocks)
        try:
            yield
        finally:
            self.shut(blocks)

    def open(self, blocks: Sequence[int]) -> None:
        at = np.asarray(blocks, dtype=np.int64)
        assert not (self.generations[at] & 1).any(), "a block has one writer at a time"
        self.generations[at] += 1

    def shut(self, blocks: Sequence[int]) -> None:
        if not blocks:
            return
        self.synchronize()
        self.generations[np.asarray(blocks, dtype=np.int64)] += 1

    def clear(self, blocks: Sequence[int]) -> None:
        """Zero open blocks and shut them."""
        for block in blocks:
            self.data[block].zero_()
        self.shut(blocks)

    def generations_of(self, blocks: Sequence[int]) -> list[int]:
        generations: list[int] = self.generations[np.asarray(blocks, dtype=np.int64)].tolist()
        return generations

    @abstractmethod
    def export(self) -> PoolExport:
        """Return how a reader opens this arena."""

    def synchronize(self) -> None:  # noqa: B027 - host memory has nothing to wait for
        """Wait until the writes issued so far are done."""

    @abstractmethod
    def close(self) -> None:
        """Free the memory. Readers see every block as being written. Idempotent."""

    def _drop_references(self) -> None:
        self.data = self.data.new_empty(0)
        self.generations = self.generations | 1


_HEAP: WeakValueDictionary[str, Arena] = WeakValueDictionary()  # by epoch; the /dev/shm of one process


class HeapArena(Arena):
    """Plain memory of this process: the simplest arena, for one process and for tests."""

    kind = "inproc"

    def __init__(self, layout: KVLayout, num_blocks: int, epoch: str):
        data = torch.zeros((num_blocks, *block_shape(layout)), dtype=torch_dtype(layout.dtype))
        super().__init__(layout, data, np.zeros(num_blocks, np.int64), epoch)
        _HEAP[epoch] = self

    def export(self) -> PoolExport:
        address: dict[str, str | int] = {"process": process_id()}
        return PoolExport(kind=self.kind, address=address, num_blocks=self.num_blocks, epoch=self.epoch)

    def close(self) -> None:
        self.generations |= 1
        self._drop_references()
        _HEAP.pop(self.epoch, None)


class ShmArena(Arena):
    """A file under /dev/shm. Other processes of the same user and host map it read-only."""

    kind = "shm"

    def __init__(self, layout: KVLayout, num_blocks: int, epoch: str, worker: str, directory: Path = SHM):
        self._host = host_id(directory)
        self._segment = Segment.create(worker, Header(num_blocks, block_bytes(layout), epoch), directory)
        try:
            data = segment_data(self._segment, layout)
            super().__init__(layout, data, self._segment.generations, epoch)
        except BaseException:
            self._segment.close()
            raise

    def export(self) -> PoolExport:
        address: dict[str, str | int] = {"name": self._segment.name, "host": self._host}
        return PoolExport(kind=self.kind, address=address, num_blocks=self.num_blocks, epoch=self.epoch)

    def close(self) -> None:
        self._segment.close()
        self._drop_references()


def segment_data(segment: Segment, layout: KVLayout) -> Tensor:
    """Return the blocks of a mapped file as a tensor, which keeps the mapping."""
    header = segment.header
    count = header.num_blocks * layout.block_elements
    flat = torch.frombuffer(segment.blocks, dtype=torch_dtype(layout.dtype), count=count)
    return flat.view(header.num_blocks, *block_shape(layout))


def heap_arena(epoch: str) -> Arena | None:
    """Return this process's open `HeapArena` of that epoch."""
    return _HEAP.get(epoch)


def host_id(directory: Path = SHM) -> str:
    """Identify the running kernel and the mounted file system. Processes with the same id can share files there; two
    containers of one machine differ unless they share the mount."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{directory.stat().st_dev}"


@cache
def process_id() -> str:
    """Identify this process. The system's process ids repeat between containers."""
    return secrets.token_hex(16)


def num_blocks_in(budget_bytes: int, layout: KVLayout, budget: str = "pool_bytes") -> int:
    """Return how many blocks fit into a byte budget. `budget` is the setting's name, for the `InvalidRequest` raised
    if it is too small for one."""
    num_blocks = budget_bytes // block_bytes(layout)
    if num_blocks < 1:
        raise InvalidRequest(
            f"{budget} is {budget_bytes}; one block of this layout needs {block_bytes(layout)}", param=budget
        )
    return num_blocks


@dataclass(frozen=True)
class Writer:
    """Writes tokens from `begin` on of the sequence in `blocks`."""

    data: Tensor
    blocks: Sequence[int]
    begin: int

    def write(self, first: int, states: Tensor) -> None:
        """Write the layers from `first` on, `(n, 2, T, H, D)`."""
        copy_layers_in(self.data, self.blocks, self.begin, first, states)

    def copy(self, span: BlockSpan, layers: Mapping[int, int]) -> None:
        """Copy whole layers of the same tokens from other blocks. `layers` maps each layer here to its source layer."""
        span.copy_layers(self.data, self.blocks, self.begin, layers)


class PoolMemory:
    """Copies between a pool's blocks and tensors. Knows no cache, no tenant and no lock.

    The caller holds the blocks, and is the only writer of those it writes to. Both are true of what `Pool` gives out.
    """

    def __init__(self, arena: Arena):
        self.arena = arena
        self._closed = False

    @property
    def layout(self) -> KVLayout:
        return self.arena.layout

    @property
    def epoch(self) -> str:
        return self.arena.epoch

    def export(self) -> PoolExport:
        return self.arena.export()

    def gather(self, blocks: Sequence[int], begin: int, end: int, out: KVCache | None = None) -> KVCache:
        """Copy out tokens `[begin, end)` of the sequence in `blocks`, as layers `(H, T, D)` over token-major memory.

        With `out`, which must start at `begin` and hold `end - begin` tokens, its tensors are filled. They may be views
        of any memory order and dtype.
        """
        self._check_open()
        check_blocks(blocks, self.arena.num_blocks, InvalidRequest)
        check_range(blocks, begin, end, self.layout.block_tokens)
        out = empty_cache(self.layout, begin, end, self.arena.data.device) if out is None else out
        if (out.start, out.num_tokens) != (begin, end - begin):
            raise InvalidRequest(f"out holds {out.num_tokens} tokens from {out.start}; it must hold [{begin}, {end})")
        copy_out(self.arena.data, blocks, out)
        return out

    def scatter(self, blocks: Sequence[int], source: KVCache) -> None:
        """Write `source` into the sequence in `blocks` at its own positions, which need not be block-aligned."""
        with self.writing(blocks, source.start, source.start + source.num_tokens):
            copy_in(self.arena.data, blocks, source)

    @contextmanager
    def writing(self, blocks: Sequence[int], begin: int, end: int) -> Iterator[Writer]:
        """Mark a write of tokens `[begin, end)` and yield the `Writer` for it."""
        self._check_open()
        check_blocks(blocks, self.arena.num_blocks, InvalidRequest)
        check_range(blocks, begin, end, self.layout.block_tokens)
        touched = blocks[begin // self.layout.block_tokens : blocks_for(end, self.layout.block_tokens)]
        with self.arena.writing(touched):
            yield Writer(self.arena.data, blocks, begin)

    def _check_open(self) -> None:
        if self._closed:
            raise WorkerUnavailable("the pool is closed")
