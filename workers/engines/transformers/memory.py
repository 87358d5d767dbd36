"""`WorkingMemory`: the KV of one running sequence, written in place. `BufferPool`: its memory on the CPU.

The layout is token-major like a pool block's, so that pool blocks are copied in and out without transposing:

    buffer[layer, 0 (key) | 1 (value), token, head, dim]

transformers' own DynamicCache concatenates, which copies the whole cache at every step; its StaticCache makes the model
attend over the unused rest.
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
HUGE_PAGE_BYTES = 2 * 2**20  # smaller buffers are left to torch's allocator
ROUNDING_BYTES = 16 * 2**20  # so that a slightly longer sequence fits into the buffer of the last one


class BufferPool:
    """Large CPU buffers that outlive a sequence: the largest one returned is kept for the next. Safe from any thread.

    Fresh memory costs a page fault for every page, on a virtual machine often one of the host's too, which takes longer
    than filling it. A buffer returns when the last tensor over it is gone. So no sequence ever gets memory that a
    running step may still write to.
    """

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []  # at most one

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor. It may hold data of earlier sequences: write before reading."""
        count = math.prod(shape)
        num_bytes = count * dtype.itemsize
        if num_bytes < HUGE_PAGE_BYTES:
            return torch.empty(tuple(shape), dtype=dtype)
        memory = None
        with contextlib.suppress(IndexError):
            memory = self._free.pop()
        if memory is None or len(memory) < num_bytes:
            memory = _map_memory(-(-num_bytes // ROUNDING_BYTES) * ROUNDING_BYTES)
        owner = np.frombuffer(memory, np.uint8)  # every tensor over the memory refers to it; takes weak references
        weakref.finalize(owner, self._give_back, memory).atexit = False
        return torch.frombuffer(owner, dtype=dtype, count=count).view(*shape)

    def _give_back(self, memory: mmap.mmap) -> None:
        # Runs wherever the last tensor is freed, so without a lock: each step here is atomic in the interpreter.
        if all(len(other) < len(memory) for other in self._free[:]):
            self._free[:] = [memory]


def _map_memory(num_bytes: int) -> mmap.mmap:
    """Map anonymous memory, in huge pages where the system has them."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError, AttributeError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


class WorkingMemory:
    """KV for `capacity` tokens. `reserve` grows it ahead of need, up to `limit`. CPU memory comes from `buffers`."""

    def __init__(
        self,
        geometry: KVGeometry,
        capacity: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        limit: int | None = None,
        buffers: BufferPool | None = None,
    ):
        self.geometry = geometry
        self._limit = limit
        self._buffers = buffers or BufferPool()
        shape = (geometry.num_layers, 2, capacity, geometry.num_kv_heads, geometry.head_dim)
        self._buffer = self._allocate(shape, dtype, device)
        self._layers = [WorkingLayer(self, index) for index in range(geometry.num_layers)]
        self.cache = Cache(layers=list(self._layers))

    @property
    def capacity(self) -> int:
        return self._buffer.shape[2]

    @property
    def num_tokens(self) -> int:
        return self._layers[0].num_tokens

    def resize(self, num_tokens: int) -> None:
        """Set the number of tokens held. Their KV must have been written."""
        for layer in self._layers:
            layer.num_tokens = num_tokens

    def reserve(self, num_tokens: int) -> None:
        """Grow the capacity to at least `num_tokens`. Earlier views stay valid, but no longer show this memory."""
        if num_tokens <= self.capacity:
            return
        shape = list(self._buffer.shape)
        ahead = int(self.capacity * GROWTH)
        shape[2] = max(num_tokens, ahead if self._limit is None else min(ahead, self._limit))
        grown = self._allocate(shape, self._buffer.dtype, self._buffer.device)
        grown[:, :, : self.num_tokens] = self._buffer[:, :, : self.num_tokens]
        self._buffer = grown

    def free(self) -> None:
        """Release the buffer; views keep theirs.

        The memory and its layers refer to each other. Without this call the buffer would stay until the garbage
        collector runs, and the next sequence would have to fault in fresh memory.
        """
        self.resize(0)
        self._buffer = self._buffer.new_empty((*self._buffer.shape[:2], 0, *self._buffer.shape[3:]))

    def kv(self, begin: int, end: int) -> KVCache:
        """Return tokens `[begin, end)` as views, whether written or not."""
        span = self._buffer[:, :, begin:end].transpose(2, 3)  # (layers, 2, heads, tokens, dim)
        return KVCache(tuple(span[:, 0].unbind()), tuple(span[:, 1].unbind()), begin)

    def append(self, layer: int, begin: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write one layer's new keys and values `(1, heads, T, dim)` at `begin`. Returns all up to their end."""
        end = begin + keys.shape[2]
        stored = self._buffer[layer, :, :end].transpose(1, 2)  # (2, heads, tokens, dim)
        stored[0, :, begin:] = keys[0]
        stored[1, :, begin:] = values[0]
        return stored[0:1], stored[1:2]  # (1, heads, tokens, dim)

    def _allocate(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        if device.type == "cpu":
            return self._buffers.take(shape, dtype)
        return torch.empty(tuple(shape), dtype=dtype, device=device)


class WorkingLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers is not followed by mypy
    """One layer of a `WorkingMemory`, as a cache layer of transformers."""

    is_sliding = False

    def __init__(self, memory: WorkingMemory, index: int):
        super().__init__()
        self._memory = memory
        self._index = index
        self.num_tokens = 0
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the memory was allocated with the sequence."""

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
