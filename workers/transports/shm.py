"""Between processes of one user on one host: the pool's file under /dev/shm, mapped read-only.

Python 3.11's `SharedMemory` registers attached memory with the resource tracker, which removes the owner's memory when
a reader exits. So it is not used: a reader never unlinks anything.
"""

from __future__ import annotations

import ctypes
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workers.api.errors import TransferFailed
from workers.api.schemas import KVLayout, PoolExport, Site
from workers.pool.arena import host_id
from workers.pool.blocks import block_shape, torch_dtype
from workers.pool.segment import SHM, Segment
from workers.transports.base import MemoryReader, Reader, Transport, check_header, check_layout, text_at


class ShmReader(MemoryReader):
    def __init__(self, export: PoolExport, layout: KVLayout, segment: Segment):
        super().__init__(export, layout, _readonly_tensor(segment, layout), segment.generations)
        self._segment = segment

    def _owner_alive(self) -> bool:
        return self._segment.owner_alive()

    def _unmap(self) -> None:
        super()._unmap()
        self._generations = self._generations.copy()
        self._segment.close()


class ShmTransport(Transport):
    kind = "shm"

    def __init__(self, directory: Path = SHM):
        self._directory = directory

    @staticmethod
    def reaches(export: PoolExport, site: Site) -> bool:
        return export.address.get("host") == site.host

    def open(self, export: PoolExport, layout: KVLayout, *, deadline: float = math.inf) -> Reader:
        check_layout(layout)
        segment = attach(export, self._directory)
        try:
            check_header(segment.header, export, layout, blocks_inside=True)
            return ShmReader(export, layout, segment)
        except BaseException:
            segment.close()
            raise


def attach(export: PoolExport, directory: Path) -> Segment:
    """Map the file that the export names, if it is on this host."""
    theirs, ours = text_at(export, "host"), host_id(directory)
    if theirs != ours:
        raise TransferFailed(f"the pool's memory is on host {theirs}; this worker's {directory} is on {ours}")
    return Segment.attach(text_at(export, "name"), directory)


def _readonly_tensor(segment: Segment, layout: KVLayout) -> Tensor:
    """Return the blocks of a read-only mapping as a tensor.

    PyTorch has no read-only tensors and warns of such buffers, so the memory is passed by its address. Nothing here
    writes to it, and the kernel would kill a process that did.
    """
    header = segment.header
    memory = np.frombuffer(segment.blocks, np.uint8)
    kind: Any = type("MappedBlocks", (ctypes.c_ubyte * memory.size,), {})  # unlike its base, it has attributes
    span = kind.from_address(memory.ctypes.data)
    span.keep_mapped = memory  # the tensor keeps `span`, which keeps the mapping
    flat = torch.frombuffer(span, dtype=torch_dtype(layout.dtype), count=header.num_blocks * layout.block_elements)
    return flat.view(header.num_blocks, *block_shape(layout))
