"""`Arena`: the memory of a pool's blocks, and their generation counters.

    data         [num_blocks, num_layers, 2 (key, value), block_tokens, num_kv_heads, head_dim]
    generations  [num_blocks] int64

A block's generation is even while its content stands and odd while it changes. It never goes back: whoever saw the same
even number before and after a copy has copied one content. Writers are the pool's owner only, one at a time a block;
`writing` marks the span of a write. A freed block stays odd from `open` until `clear` has zeroed it.

The order of plain loads and stores between two processes is that of x86-64 (total store order). On a machine with a
weaker one the lease, which keeps blocks from being freed at all while it lasts, is what protects a reader.

`PoolMemory`: copies between the blocks of a pool and whole tensors. Knows no cache, no tenant, no lock.

The caller holds the blocks, and alone writes to those that it writes to; both hold of what `Pool` gives out.
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
    """Base: what every memory has in common. `kind` is the name of the transport that reads it."""

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
        """Marks a write to these blocks; their generations are odd inside and two higher afterwards."""
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
        """Zero blocks that are open, and shut them."""
        for block in blocks:
            self.data[block].zero_()
        self.shut(blocks)

    def generations_of(self, blocks: Sequence[int]) -> list[int]:
        taken: list[int] = self.generations[np.asarray(blocks, dtype=np.int64)].tolist()
        return taken

    @abstractmethod
    def export(self) -> PoolExport:
        """How a reader opens this arena."""

    def synchronize(self) -> None:  # noqa: B027 - memory of the host has nothing to wait for
        """Wait until the writes issued so far are done."""

    @abstractmethod
    def close(self) -> None:
        """Give the memory back; readers see every block as being written. Idempotent."""

    def _let_go(self) -> None:
        """Keep no part of the memory alive."""
        self.data = self.data.new_empty(0)
        self.generations = self.generations | 1


_HEAP: WeakValueDictionary[str, Arena] = WeakValueDictionary()  # what /dev/shm is between processes, inside one


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
        self._let_go()
        _HEAP.pop(self.epoch, None)


class ShmArena(Arena):
    """A file under /dev/shm that other processes of the same user on the same host map read-only."""

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
        self._let_go()


def segment_data(segment: Segment, layout: KVLayout) -> Tensor:
    """The blocks of a mapped file as a tensor; the mapping lives as long as the tensor."""
    header = segment.header
    count = header.num_blocks * layout.block_elements
    flat = torch.frombuffer(segment.blocks, dtype=torch_dtype(layout.dtype), count=count)
    return flat.view(header.num_blocks, *block_shape(layout))


def heap_arena(epoch: str) -> Arena | None:
    """The open `HeapArena` of that epoch in this process."""
    return _HEAP.get(epoch)


def host_id(directory: Path = SHM) -> str:
    """Names the running kernel and the mounted file system: two containers of one machine see different ones unless
    they share the mount. Processes with the same id can share files there."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{directory.stat().st_dev}"


@cache
def process_id() -> str:
    """Names this process. A number that the system gives would be another container's as well."""
    return secrets.token_hex(16)


def num_blocks_in(budget_bytes: int, layout: KVLayout, budget: str = "pool_bytes") -> int:
    """How many blocks a byte budget pays for; `budget` is what the user calls it."""
    num_blocks = budget_bytes // block_bytes(layout)
    if num_blocks < 1:
        raise InvalidRequest(
            f"{budget} is {budget_bytes}, which holds no block; one block of this layout takes {block_bytes(layout)}",
            param=budget,
        )
    return num_blocks


@dataclass(frozen=True)
class Writer:
    """Writes tokens from `begin` on of the sequence in `blocks`."""

    data: Tensor
    blocks: Sequence[int]
    begin: int

    def write(self, first: int, states: Tensor) -> None:
        """Layers from `first` on, `(n, 2, T, H, D)`."""
        copy_layers_in(self.data, self.blocks, self.begin, first, states)

    def copy(self, span: BlockSpan, layers: Mapping[int, int]) -> None:
        """Whole layers of the same tokens in other blocks: for each layer here the one there that it gets."""
        span.copy_layers(self.data, self.blocks, self.begin, layers)


class PoolMemory:
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
        """Tokens `[begin, end)` of the sequence in `blocks`, as layers `(H, T, D)` (views of token-major memory).

        With `out`, which must start at `begin` and hold `end - begin` tokens, its tensors are filled; they may be views
        in any memory order and of another dtype.
        """
        self._check_open()
        check_blocks(blocks, self.arena.num_blocks, InvalidRequest)
        check_range(blocks, begin, end, self.layout.block_tokens)
        out = empty_cache(self.layout, begin, end, self.arena.data.device) if out is None else out
        if (out.start, out.num_tokens) != (begin, end - begin):
            raise InvalidRequest(f"out holds {out.num_tokens} tokens from {out.start}; asked for [{begin}, {end})")
        copy_out(self.arena.data, blocks, out)
        return out

    def scatter(self, blocks: Sequence[int], source: KVCache) -> None:
        """Write `source` into the sequence in `blocks`, at its own positions, which need not be block-aligned."""
        with self.writing(blocks, source.start, source.start + source.num_tokens):
            copy_in(self.arena.data, blocks, source)

    @contextmanager
    def writing(self, blocks: Sequence[int], begin: int, end: int) -> Iterator[Writer]:
        """Marks a write of tokens `[begin, end)`, which the `Writer` does."""
        self._check_open()
        check_blocks(blocks, self.arena.num_blocks, InvalidRequest)
        check_range(blocks, begin, end, self.layout.block_tokens)
        touched = blocks[begin // self.layout.block_tokens : blocks_for(end, self.layout.block_tokens)]
        with self.arena.writing(touched):
            yield Writer(self.arena.data, blocks, begin)

    def _check_open(self) -> None:
        if self._closed:
            raise WorkerUnavailable("the pool is closed")
