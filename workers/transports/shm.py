"""Between processes of one user on one host: the pool's file under /dev/shm, mapped read-only.

Python 3.11's `SharedMemory` is not used: it registers what it attaches with the resource tracker, which removes the
owner's memory when a reader exits. Here a reader never unlinks anything.
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
    """The file that the export names, if it lies on this host."""
    theirs, ours = text_at(export, "host"), host_id(directory)
    if theirs != ours:
        raise TransferFailed(f"the pool's memory is on host {theirs}; {directory} here is on {ours}")
    return Segment.attach(text_at(export, "name"), directory)


def _readonly_tensor(segment: Segment, layout: KVLayout) -> Tensor:
    """The blocks of a read-only mapping. PyTorch knows no read-only tensor and warns of such a buffer, so the memory is
    handed over by its address; nothing here writes to it, and the kernel would end a process that did."""
    header = segment.header
    memory = np.frombuffer(segment.blocks, np.uint8)
    kind: Any = type("MappedBlocks", (ctypes.c_ubyte * memory.size,), {})  # unlike its base, it takes attributes
    span = kind.from_address(memory.ctypes.data)
    span.keep_mapped = memory  # the tensor keeps `span`, and so the mapping
    flat = torch.frombuffer(span, dtype=torch_dtype(layout.dtype), count=header.num_blocks * layout.block_elements)
    return flat.view(header.num_blocks, *block_shape(layout))
