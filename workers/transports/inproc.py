"""The simplest transport: a pool of this process."""

from __future__ import annotations

import math

from workers.api.errors import CacheStale, TransferFailed
from workers.api.schemas import KVLayout, PoolExport, Site
from workers.pool.arena import Arena, heap_arena
from workers.transports.base import MemoryReader, Reader, Transport


class InprocReader(MemoryReader):
    def __init__(self, export: PoolExport, layout: KVLayout, arena: Arena):
        super().__init__(export, layout, arena.data, arena.generations)

    def _owner_alive(self) -> bool:
        return heap_arena(self.export.epoch) is not None


class InprocTransport(Transport):
    kind = "inproc"

    @staticmethod
    def reaches(export: PoolExport, site: Site) -> bool:
        return export.address.get("process") == site.process

    def open(self, export: PoolExport, layout: KVLayout, *, deadline: float = math.inf) -> Reader:
        arena = heap_arena(export.epoch)
        if arena is None:
            raise CacheStale(f"no pool of epoch {export.epoch} is open in this process")
        if (arena.num_blocks, arena.layout) != (export.num_blocks, layout):
            raise TransferFailed(
                f"the pool has {arena.num_blocks} blocks of {arena.layout}; its ticket says "
                f"{export.num_blocks} of {layout}"
            )
        return InprocReader(export, layout, arena)
