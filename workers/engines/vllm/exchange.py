"""The exchange pool: where published KV stands while it is lent. vLLM's scheduler owns it, its workers write into it.

They write only to blocks that the scheduler has taken for that very save and has lent to nobody yet, so generations
are the owner's business alone. Each worker fills the heads that it holds.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from workers.api.errors import TransferFailed
from workers.api.schemas import KVLayout, PoolExport
from workers.engines.vllm.shards import Heads
from workers.pool.arena import create_arena, new_epoch, segment_data
from workers.pool.blocks import check_blocks, copy_layer_in
from workers.pool.pool import Pool
from workers.pool.segment import Segment, reclaim_dead_segments

KIND = "shm"


def create_exchange(name: str, layout: KVLayout, budget_bytes: int, fingerprint: str) -> Pool:
    """A pool in shared memory. Raises `PoolMemoryError` where it does not fit."""
    reclaim_dead_segments()
    arena = create_arena(
        KIND, layout, budget_bytes, worker=name, epoch=new_epoch(), budget="exchange_bytes"
    )
    return Pool(arena, fingerprint)


class ExchangeWriter:
    """The exchange's blocks, opened for writing by a worker of the same user and host."""

    def __init__(self, export: PoolExport, layout: KVLayout):
        self._segment = Segment.attach(str(export.address["name"]), writable=True)
        self._num_blocks = export.num_blocks
        self._data: Tensor | None = segment_data(self._segment, layout)  # (num_blocks, L, 2, block_tokens, H, D)

    def write(self, blocks: Sequence[int], layer: int, heads: Heads, keys: Tensor, values: Tensor) -> None:
        """One layer of a sequence from token 0 on, of some heads: `(heads, T, D)` each."""
        if self._data is None:
            raise TransferFailed("the exchange has been closed here")
        check_blocks(blocks, self._num_blocks, TransferFailed)
        copy_layer_in(self._data[..., heads.part, :], blocks, 0, layer, keys.cpu(), values.cpu())

    def close(self) -> None:
        self._data = None
        self._segment.close()
