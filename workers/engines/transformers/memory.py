"""`WorkingMemory`: KV of one running sequence, written in place.

Laid out as a pool's block is, token by token, so that pool blocks are copied in and out without transposing:

    buffer[layer, 0 (key) | 1 (value), token, head, dim]

transformers' own DynamicCache concatenates, which copies the whole cache at every step; its StaticCache makes the model
attend over the unused rest.

`BufferPool`: large memory on the CPU, kept for the next sequence when one has ended.

Fresh memory costs a fault for every page, on a virtual machine often one of the host's too, and that takes longer than
filling it. A room comes back when the last tensor that looks into it is gone, whoever holds that: nobody ever gets
memory that a step may still be writing to.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from mappers.cache import KVCache, KVGeometry

GROWTH = 1.5


class WorkingMemory:
    """Room for `capacity` tokens; more is made when `reserve` asks for it, ahead of need but not beyond `limit`. On the
    CPU it comes from `rooms`."""

    def __init__(
        self,
        geometry: KVGeometry,
        capacity: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        limit: int | None = None,
        rooms: BufferPool | None = None,
    ):
        self.geometry = geometry
        self._limit = limit
        self._rooms = rooms or BufferPool()
        shape = (geometry.num_layers, 2, capacity, geometry.num_kv_heads, geometry.head_dim)
        self._buffer = self._room(shape, dtype, device)
        self._layers = [WorkingLayer(self, index) for index in range(geometry.num_layers)]
        self.cache = Cache(layers=list(self._layers))

    @property
    def capacity(self) -> int:
        return self._buffer.shape[2]

    @property
    def num_tokens(self) -> int:
        return self._layers[0].num_tokens

    def resize(self, num_tokens: int) -> None:
        """Take the first `num_tokens` tokens as what stands here. Their KV must have been written."""
        for layer in self._layers:
            layer.num_tokens = num_tokens

    def reserve(self, num_tokens: int) -> None:
        """Make room for `num_tokens` in all. Views taken before stay valid but are no longer this memory."""
        if num_tokens <= self.capacity:
            return
        shape = list(self._buffer.shape)
        ahead = int(self.capacity * GROWTH)
        shape[2] = max(num_tokens, ahead if self._limit is None else min(ahead, self._limit))
        grown = self._room(shape, self._buffer.dtype, self._buffer.device)
        grown[:, :, : self.num_tokens] = self._buffer[:, :, : self.num_tokens]
        self._buffer = grown

    def free(self) -> None:
        """Hold no room any more. A memory and its layers refer to each other, so the room would otherwise stay until
        the collector comes, and the next sequence would have to fault in fresh memory. Views keep theirs."""
        self.resize(0)
        self._buffer = self._buffer.new_empty((*self._buffer.shape[:2], 0, *self._buffer.shape[3:]))

    def kv(self, begin: int, end: int) -> KVCache:
        """Tokens `[begin, end)` as views, written or not."""
        span = self._buffer[:, :, begin:end].transpose(2, 3)  # (layers, 2, heads, tokens, dim)
        return KVCache(tuple(span[:, 0].unbind()), tuple(span[:, 1].unbind()), begin)

    def _room(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        if device.type == "cpu":
            return self._rooms.take(shape, dtype)
        return torch.empty(tuple(shape), dtype=dtype, device=device)

    def append(self, layer: int, begin: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write new keys and values of one layer, `(1, heads, new tokens, dim)`, at `begin`; all up to their end."""
        end = begin + keys.shape[2]
        room = self._buffer[layer, :, :end].transpose(1, 2)  # (2, heads, tokens, dim)
        room[0, :, begin:] = keys[0]
        room[1, :, begin:] = values[0]
        return room[0:1], room[1:2]  # (1, heads, tokens, dim)


class WorkingLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers is not followed by mypy
    """One layer of a `WorkingMemory`, as a transformers model wants to see it."""

    is_sliding = False

    def __init__(self, memory: WorkingMemory, index: int):
        super().__init__()
        self._memory = memory
        self._index = index
        self.num_tokens = 0
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing is left to do: the memory was allocated with the sequence."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        begin = self.num_tokens
        self.num_tokens += key_states.shape[2]
        return self._memory.append(self._index, begin, key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.num_tokens + query_length, 0

    def get_seq_length(self) -> int:
        return self.num_tokens

    def get_max_length(self) -> int:
        return -1


SMALL = 2 * 2**20  # bytes of a huge page; less is left to torch's allocator
ROUNDED = 16 * 2**20  # so that a sequence that is a little longer than the last one has room in its room


class BufferPool:
    """Keeps the largest room that came back; the others' memory goes to the system. For use from any thread."""

    def __init__(self) -> None:
        self._kept: list[mmap.mmap] = []  # at most one

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor: whoever reads of it what he has not written may see what others wrote."""
        count = math.prod(shape)
        if count * dtype.itemsize < SMALL:
            return torch.empty(tuple(shape), dtype=dtype)
        memory = self._kept_or_new(count * dtype.itemsize)
        room = np.frombuffer(memory, np.uint8)  # takes weak references, and is what every tensor in it refers to
        weakref.finalize(room, self._give_back, memory).atexit = False
        return torch.frombuffer(room, dtype=dtype, count=count).view(*shape)  # keeps `room`

    def _kept_or_new(self, num_bytes: int) -> mmap.mmap:
        with contextlib.suppress(IndexError):
            memory = self._kept.pop()
            if len(memory) >= num_bytes:
                return memory
        return _new(-(-num_bytes // ROUNDED) * ROUNDED)

    def _give_back(self, memory: mmap.mmap) -> None:
        # Called wherever the last tensor goes, so without a lock: each step here is one of the interpreter's.
        if all(len(other) < len(memory) for other in self._kept[:]):
            self._kept[:] = [memory]


def _new(num_bytes: int) -> mmap.mmap:
    """In huge pages, where the system has them."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError, AttributeError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
