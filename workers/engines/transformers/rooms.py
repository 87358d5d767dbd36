"""`Rooms`: large memory on the CPU, kept for the next sequence when one has ended.

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

import numpy as np
import torch
from torch import Tensor

SMALL = 2 * 2**20  # bytes of a huge page; less is left to torch's allocator
ROUNDED = 16 * 2**20  # so that a sequence that is a little longer than the last one has room in its room


class Rooms:
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
