"""`WorkerSide`: the connector in one vLLM worker, which holds some heads of every layer.

    load   source's pool ──► (mapper) ──► our heads ──► paged blocks       before the step's forward pass
    save   paged blocks ──► our heads of the exchange's blocks              after it

A load that fails is reported by its blocks, which vLLM then computes; nothing is raised into vLLM.
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
    """vLLM's memory of one worker: a tensor a layer, in the model's order, how it is laid out, and which heads it
    holds."""

    layers: tuple[Tensor, ...]  # (blocks, H, block_tokens, 2 * D) each
    layout: PagedLayout
    heads: HeadRange

    @property
    def block_tokens(self) -> int:
        return self.layers[0].shape[2]

    def write(self, blocks: Sequence[int], begin: int, layer: int, keys: Tensor, values: Tensor) -> None:
        """One layer's tokens from `begin` on, all heads of the model, `(H, T, D)`."""
        mine = self.heads.part
        self.layout.write(self.layers[layer], blocks, begin, keys[mine], values[mine])


class PoolReaders:
    """The pools that tickets speak of, opened when they are first read; those of dead owners are closed then."""

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

    def _close(self, is_wanted: Callable[[Reader], bool]) -> None:
        for epoch in [epoch for epoch, reader in self._open.items() if is_wanted(reader)]:
            self._open.pop(epoch).close()


class ExchangeWriter:
    """The exchange's blocks, opened for writing by a worker of the same user and host."""

    def __init__(self, export: PoolExport, layout: KVLayout):
        self._segment = Segment.attach(str(export.address["name"]), writable=True)
        self._num_blocks = export.num_blocks
        self._data: Tensor | None = segment_data(self._segment, layout)  # (num_blocks, L, 2, block_tokens, H, D)

    def write(self, blocks: Sequence[int], layer: int, heads: HeadRange, keys: Tensor, values: Tensor) -> None:
        """One layer of a sequence from token 0 on, of some heads: `(heads, T, D)` each."""
        if self._data is None:
            raise TransferFailed("the exchange has been closed here")
        check_blocks(blocks, self._num_blocks, TransferFailed)
        copy_layer_in(self._data[..., heads.part, :], blocks, 0, layer, keys.cpu(), values.cpu())

    def close(self) -> None:
        self._data = None
        self._segment.close()


class WorkerSide:
    """`mappers` are those into our model, `exchange` is the layout of the exchange pool."""

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
        """What was computed over a load that failed is not worth keeping: vLLM computes it again."""
        for save in work.saves:
            self._saved[save.request_id] = save.request_id not in self._failed_requests and self._save(save)
        self._failed_requests.clear()

    def take_failed_blocks(self) -> set[int]:
        """The blocks that could not be loaded since the last call."""
        taken, self._failed_blocks = self._failed_blocks, set()
        return taken

    def take_saved(self) -> dict[str, bool]:
        """The saves since the last call, and whether each was done."""
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
                self._note_failure(load, at, error)
                return False
        return True

    def _load_chunk(self, blocks: Sequence[int], part: PromptPart, begin: int, end: int) -> None:
        ticket = part.ticket
        asked = (ticket.blocks, ticket.generations, begin, end)
        reader = self._sources.reader(ticket)

        def write(layer: int, keys: Tensor, values: Tensor) -> None:
            self._cache.write(blocks, begin, layer, keys, values)

        if part.mapper is None:
            chunk = reader.read(*asked)
            for layer, (keys, values) in enumerate(zip(chunk.keys, chunk.values, strict=True)):
                write(layer, keys, values)
        else:
            with reader.reading(*asked) as span:  # stale at its end, it is a load that failed
                self._mapper(part.mapper).map_into(span, write)

    def _mapper(self, bundle_id: str) -> Mapper:
        if bundle_id not in self._mappers:
            raise BundleUnusable(f"this worker has no bundle {bundle_id}; it has: {', '.join(self._mappers) or 'none'}")
        return self._mappers[bundle_id]

    def _note_failure(self, load: LoadOp, token: int, error: Exception) -> None:
        """Everything from the first token that is missing on must be computed: what follows was not loaded either, or
        is computed over that in this very step."""
        code = error.code if isinstance(error, KvrelayError) else "internal_error"
        log.warning("a load failed at token %d of %d: %s: %s", token, load.end, code, error)
        self._failed_blocks.update(load.blocks[token // self._cache.block_tokens :])
        self._failed_requests.add(load.request_id)

    def _save(self, save: SaveOp) -> bool:
        try:
            exchange = self._open_exchange(save.pool)
            for layer, cache in enumerate(self._cache.layers):
                keys, values = self._cache.layout.read(cache, save.blocks, save.num_tokens)
                exchange.write(save.into, layer, self._cache.heads, keys, values)
        except Exception as error:
            log.warning("the KV of %d tokens was not saved: %s", save.num_tokens, error)
            return False
        return True

    def _open_exchange(self, export: PoolExport) -> ExchangeWriter:
        if self._exchange is None:
            self._exchange = ExchangeWriter(export, self._exchange_layout)
        return self._exchange
