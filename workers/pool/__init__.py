"""A worker's KV pool: paged memory that other processes may read, and the caches in it.

segment.py   a pool's file in shared memory
arena.py     the memory of blocks on the heap or in shared memory, and copies to and from it
cuda.py      the memory of blocks on a GPU
blocks.py    copies between blocks and tensors; plain functions
tables.py    which blocks are free, which prefixes are cached, what to evict
entries.py   caches, holds and leases as values
pool.py      the one owner of blocks and caches
tiered.py    a pool that evicts to host memory first
"""

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
    """Create an arena of kind `shm`, `cuda_ipc` (on `device`) or `inproc`. Raises `InvalidRequest`, and what the
    memory's allocation raises."""
    num_blocks = num_blocks_in(budget_bytes, layout, budget)
    if kind == HeapArena.kind:
        return HeapArena(layout, num_blocks, epoch)
    if kind == ShmArena.kind:
        return ShmArena(layout, num_blocks, epoch, worker, directory)
    if kind == "cuda_ipc":
        from workers.pool.cuda import CudaArena  # loads the CUDA runtime

        return CudaArena(layout, num_blocks, epoch, worker, directory, device)
    raise InvalidRequest(f"unknown pool kind {kind!r}; known: inproc, shm, cuda_ipc", param="pool")
