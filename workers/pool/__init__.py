"""A worker's KV pool: paged memory that another process may read, and the caches in it."""

from __future__ import annotations

import secrets
from pathlib import Path

from workers.api.errors import InvalidRequest
from workers.api.schemas import KVLayout
from workers.pool.arena import Arena, HeapArena, ShmArena, num_blocks_in
from workers.pool.segment import SHM


def new_epoch() -> str:
    return secrets.token_hex(16)


def create_arena(
    kind: str,
    layout: KVLayout,
    budget_bytes: int,
    *,
    worker: str,
    epoch: str,
    directory: Path = SHM,
    device: str = "cuda",
    budget: str = "pool_bytes",
) -> Arena:
    """A new arena of the kind named: `shm`, `cuda_ipc` (on `device`) or `inproc`. Errors as `num_blocks_in`."""
    num_blocks = num_blocks_in(budget_bytes, layout, budget)
    if kind == HeapArena.kind:
        return HeapArena(layout, num_blocks, epoch)
    if kind == ShmArena.kind:
        return ShmArena(layout, num_blocks, epoch, worker, directory)
    if kind == "cuda_ipc":
        from workers.pool.cuda import CudaArena  # loads the CUDA runtime

        return CudaArena(layout, num_blocks, epoch, worker, directory, device)
    raise InvalidRequest(f"unknown pool kind {kind!r}; known: inproc, shm, cuda_ipc", param="pool")
