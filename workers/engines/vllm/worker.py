"""`WorkerSide`: the connector in one vLLM worker, which holds some heads of every layer.

    load   source's pool ──► (mapper) ──► own heads ──► paged blocks       before the step's forward pass
    save   paged blocks ──► own heads of the exchange's blocks              after it

Nothing is raised into vLLM. A failed load is reported by its blocks, which vLLM then computes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from mappers.mapper import Mapper
from workers.api.errors import BundleUnusable, KvrelayError, TransferFailed
from workers.api.schemas import KVLayout, PoolExport, Ticket
from workers.engines.vllm.paged import HeadRange, PagedLayout
from workers.engines.vllm.plan import LoadOp, PromptPart, SaveOp, StepWork
from workers.handoff import chunks
from workers.pool.arena import segment_data
from workers.pool.blocks import check_blocks, copy_layer_in
from workers.pool.segment import Segment
from workers.transports import load_transport
from workers.transports.base import Reader

log = logging.getLogger(__name__)

CHUNK_TOKENS = 512


@dataclass(frozen=True)
class PagedCache:
    """One vLLM worker's KV memory: a tensor per layer in the model's order, its layout, and the heads that it holds."""

    layers: tuple[Tensor, ...]  # (blocks, H, block_tokens, 2 * D) each
    layout: PagedLayout
    heads: HeadRange

    @property
    def block_tokens(self) -> int:
        return self.layers[0].shape[2]

    def write(self, blocks: Sequence[int], begin: int, layer: int, keys: Tensor, values: Tensor) -> None:
        """Write one layer's tokens from `begin` on, given for all heads of the model, `(H, T, D)`."""
        own = self.heads.part
        self.layout.write(self.layers[layer], blocks, begin, keys[own], values[own])


class PoolReaders:
    """Readers of the pools that tickets name, opened on first use. Opening one closes those of dead owners."""

    def __init__(self) -> None:
        self._open: dict[str, Reader] = {}

    def reader(self, ticket: Ticket) -> Reader:
        epoch = ticket.pool.epoch
        if epoch not in self._open:
            self._close(lambda reader: not reader.alive())
            self._open[epoch] = load_transport(ticket.pool.kind).open(ticket.pool, ticket.layout)
        return self._open[epoch]

    def close(self) -> None:
        self._close(lambda reader: True)

    def _close(self, condition: Callable[[Reader], bool]) -> None:
        for epoch in [epoch for epoch, reader in self._open.items() if condition(reader)]:
            self._open.pop(epoch).close()


class ExchangeWriter:
    """The exchange's blocks, opened for writing by a worker of the same user and host."""

    def __init__(self, export: PoolExport, layout: KVLayout):
        self._segment = Segment.attach(str(export.address["name"]), writable=True)
        self._num_blocks = export.num_blocks
        self._data: Tensor | None = segment_data(self._segment, layout)  # (num_blocks, L, 2, block_tokens, H, D)

    def write(self, blocks: Sequence[int], layer: int, heads: HeadRange, keys: Tensor, values: Tensor) -> None:
        """Write one layer of a sequence from token 0 on, for some heads: `(heads, T, D)` each."""
        if self._data is None:
            raise TransferFailed("this worker has closed the exchange")
        check_blocks(blocks, self._num_blocks, TransferFailed)
        copy_layer_in(self._data[..., heads.part, :], blocks, 0, layer, keys.cpu(), values.cpu())

    def close(self) -> None:
        self._data = None
        self._segment.close()


class WorkerSide:
    """`mappers` are those into this model. `exchange` is the layout of the exchange pool."""

    def __init__(self, cache: PagedCache, mappers: Iterable[Mapper], exchange: KVLayout):
        self._cache = cache
        self._mappers = {mapper.bundle_id: mapper for mapper in mappers}
        self._sources = PoolReaders()
        self._exchange_layout = exchange
        self._exchange: ExchangeWriter | None = None
        self._failed_blocks: set[int] = set()
        self._failed_requests: set[str] = set()
        self._saved: dict[str, bool] = {}

    def load(self, work: StepWork) -> None:
        for load in work.loads:
            for part in load.parts:
                if not self._load_part(load, part):
                    break

    def save(self, work: StepWork) -> None:
        """Save, except what was computed over a failed load: vLLM computes that again."""
        for save in work.saves:
            self._saved[save.request_id] = save.request_id not in self._failed_requests and self._save(save)
        self._failed_requests.clear()

    def take_failed_blocks(self) -> set[int]:
        """Return the blocks that could not be loaded since the last call."""
        taken, self._failed_blocks = self._failed_blocks, set()
        return taken

    def take_saved(self) -> dict[str, bool]:
        """Return the saves since the last call, and whether each succeeded."""
        taken, self._saved = self._saved, {}
        return taken

    def close(self) -> None:
        self._sources.close()
        if self._exchange is not None:
            self._exchange.close()

    def _load_part(self, load: LoadOp, part: PromptPart) -> bool:
        begin, end = max(load.begin, part.begin), min(load.end, part.end)
        for at, until in chunks(begin, end, CHUNK_TOKENS):
            try:
                self._load_chunk(load.blocks, part, at, until)
            except Exception as error:
                # Everything from the first missing token on must be computed: later tokens were not loaded either, or
                # are computed over the missing ones in this very step.
                code = error.code if isinstance(error, KvrelayError) else "internal_error"
                log.warning("a load failed at token %d of %d: %s: %s", at, load.end, code, error)
                self._failed_blocks.update(load.blocks[at // self._cache.block_tokens :])
                self._failed_requests.add(load.request_id)
                return False
        return True

    def _load_chunk(self, blocks: Sequence[int], part: PromptPart, begin: int, end: int) -> None:
        ticket = part.ticket
        span_args = (ticket.blocks, ticket.generations, begin, end)
        reader = self._sources.reader(ticket)

        def write(layer: int, keys: Tensor, values: Tensor) -> None:
            self._cache.write(blocks, begin, layer, keys, values)

        if part.mapper is None:
            chunk = reader.read(*span_args)
            for layer, (keys, values) in enumerate(zip(chunk.keys, chunk.values, strict=True)):
                write(layer, keys, values)
        elif part.mapper not in self._mappers:
            raise BundleUnusable(
                f"this worker has no bundle {part.mapper}; it has: {', '.join(self._mappers) or 'none'}"
            )
        else:
            with reader.reading(*span_args) as span:  # raises at its end if the source is stale: the load failed
                self._mappers[part.mapper].map_into(span, write)

    def _save(self, save: SaveOp) -> bool:
        try:
            if self._exchange is None:
                self._exchange = ExchangeWriter(save.pool, self._exchange_layout)
            for layer, cache in enumerate(self._cache.layers):
                keys, values = self._cache.layout.read(cache, save.blocks, save.num_tokens)
                self._exchange.write(save.into, layer, self._cache.heads, keys, values)
        except Exception as error:
            log.warning("saving the KV of %d tokens failed: %s", save.num_tokens, error)
            return False
        return True
