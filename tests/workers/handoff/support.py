"""A pair of workers without models: pools, a mapper with random weights, an engine whose native KV is random."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from mappers.cache import KVCache, KVChunk
from mappers.manifest import (
    COPY,
    KINDS,
    Calibration,
    LayerSpec,
    Manifest,
    ModelCard,
    OutputSpec,
    probe_name,
    weight_name,
)
from mappers.mapper import Mapper, TogetherSink
from mappers.rope import Rope
from tests.workers.pool.support import FINGERPRINT, LAYOUT, SALT, random_kv
from tests.workers.transports.owner import SECRET, RemoteOwner
from workers.api.errors import WorkerUnavailable
from workers.api.schemas import KVLayout, LeaseRequest, Ticket, TransferRequest
from workers.engines.scheduling import Compute
from workers.handoff import Handoffs, HandoffTarget
from workers.pool import create_arena, new_epoch
from workers.pool.blocks import block_bytes
from workers.pool.entries import CacheEntry
from workers.pool.pool import Pool
from workers.pool.tickets import TicketIssuer
from workers.transports import site_here
from workers.transports.readers import Readers

SOURCE_LAYOUT = LAYOUT
TARGET_LAYOUT = KVLayout(num_layers=4, num_kv_heads=3, head_dim=8, block_tokens=8, dtype="float32")
SOURCE, TARGET = FINGERPRINT, "7a" * 32
CHUNK_TOKENS = 16
NUM_BLOCKS = 64


def card(name: str, fingerprint: str, layout: KVLayout) -> ModelCard:
    config = {
        "model_type": "llama",
        "hidden_size": layout.num_kv_heads * layout.head_dim,
        "num_attention_heads": layout.num_kv_heads,
        "num_key_value_heads": layout.num_kv_heads,
        "num_hidden_layers": layout.num_layers,
        "head_dim": layout.head_dim,
        "max_position_embeddings": 512,
        "vocab_size": 32,
    }
    return ModelCard(
        name=name,
        fingerprint=fingerprint,
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        config=config,
    )


def random_mapper(seed: int = 0, source: str = SOURCE, target: str = TARGET) -> Mapper:
    """Make target layer i from source layers i - 1 and i, separately for keys and values."""
    last = SOURCE_LAYOUT.num_layers - 1
    below = [(min(max(i - 1, 0), last - 1), min(max(i, 1), last)) for i in range(TARGET_LAYOUT.num_layers)]
    specs = [
        LayerSpec(keys=OutputSpec(method="ridge", key_layers=two), values=OutputSpec(method="ridge", value_layers=two))
        for two in below
    ]
    return mapper_of(specs, card("small", source, SOURCE_LAYOUT), card("large", target, TARGET_LAYOUT), seed)


def mapper_of(specs: Sequence[LayerSpec], source: ModelCard, target: ModelCard, seed: int) -> Mapper:
    """Build a mapper of these layers with random weights."""
    weights = {}
    generator = torch.Generator().manual_seed(seed)
    for layer, spec in enumerate(specs):
        for kind in KINDS:
            output = spec.of(kind)
            if output.method != COPY:
                shape = (len(output.blocks) * source.geometry.width, target.geometry.width)
                weights[weight_name(layer, kind, "weight")] = torch.randn(shape, generator=generator) / 4
                weights[weight_name(layer, kind, "bias")] = torch.randn(shape[1], generator=generator)
    for role, model in (("source", source), ("target", target)):
        weights[probe_name(role)] = Rope.from_config(model.config).probe()
    manifest = Manifest(
        source=source,
        target=target,
        method="ridge",
        layers=tuple(specs),
        precision="float32",
        calibration=Calibration(name="none", digest=f"{seed:064x}", num_documents=0, num_tokens=0, head=0),
        created="2026-01-01",
        tool_version="test",
        licence="none",
    )
    return Mapper(manifest, weights)


class BlockingMapper(Mapper):
    """A mapper that blocks in a chunk until `released` is set."""

    def __init__(self, like: Mapper | None = None) -> None:
        like = like or random_mapper()
        super().__init__(like.manifest, like.weights)
        self.started, self.released = threading.Event(), threading.Event()

    def map_together(self, chunk: KVChunk, sink: TogetherSink, *, copies: bool = True) -> None:
        self.started.set()
        self.released.wait(10)
        super().map_together(chunk, sink, copies=copies)


class BrokenMapper(Mapper):
    """A mapper that raises."""

    def __init__(self) -> None:
        like = random_mapper()
        super().__init__(like.manifest, like.weights)

    def map_together(self, chunk: KVChunk, sink: TogetherSink, *, copies: bool = True) -> None:
        raise RuntimeError("out of memory")


def native_kv(token_ids: Sequence[int]) -> KVCache:
    """Return the KV that the target's engine computes for these tokens."""
    return random_kv(0, len(token_ids), seed=1000 + sum(token_ids), layout=TARGET_LAYOUT)


def make_pool(
    layout: KVLayout, fingerprint: str = TARGET, *, kind: str = "inproc", num_blocks: int = NUM_BLOCKS, **options: Any
) -> Pool:
    budget = num_blocks * block_bytes(layout)
    return Pool(create_arena(kind, layout, budget, worker="test-handoff", epoch=new_epoch()), fingerprint, **options)


class LocalPeer(TicketIssuer):
    """A peer in this process: a pool with the calls that a handoff makes."""

    async def lease(self, cache_id: str, request: LeaseRequest, *, timeout_s: float) -> Ticket:
        return self.ticket(self.pool.lease(cache_id, request.tenant_salt, ttl_s=request.ttl_s))

    async def release(self, cache_id: str, lease_id: str, *, timeout_s: float = 2.0) -> None:
        self.pool.release(cache_id, lease_id)

    async def drop(self, cache_id: str, *, timeout_s: float = 2.0) -> None:
        self.pool.discard(cache_id)


@dataclass
class Pair:
    """A source worker and the receiving side of a target worker."""

    source: Pool
    local_peer: LocalPeer
    target: HandoffTarget
    compute: Compute
    handoffs: Handoffs = field(init=False)

    def __post_init__(self) -> None:
        self.handoffs = Handoffs(self.target)

    def adjust(self, **changes: Any) -> None:
        """Replace parts of the target."""
        self.target = replace(self.target, **changes)
        self.handoffs = Handoffs(self.target)

    def before_steps(self, callback: Callable[[int], object]) -> None:
        """Call `callback(i)` before the i-th compute step of the target."""
        count = iter(range(1_000_000))

        async def run_step(step: Callable[[], Any]) -> Any:
            callback(next(count))
            return await self.compute.run(step)

        self.adjust(run_step=run_step)

    @property
    def num_used(self) -> int:
        """Number of used blocks of the target's pool."""
        return self.target.pool.stats.used_blocks

    def source_cache(self, num_tokens: int, *, seed: int = 0, ttl_s: float = 600) -> CacheEntry:
        kv = random_kv(0, num_tokens, seed, self.source.layout)
        return self.source.store(list(range(seed, seed + num_tokens)), kv, SALT, ttl_s=ttl_s)

    def close(self) -> None:
        self.compute.close()
        self.target.readers.close()
        self.source.close()
        self.target.pool.close()


def make_pair(kind: str = "inproc", *, target_layout: KVLayout = TARGET_LAYOUT, **source: Any) -> Pair:
    compute = Compute(on_start=lambda: torch.set_num_threads(1))
    pool = make_pool(source.pop("layout", SOURCE_LAYOUT), SOURCE, kind=kind, **source)
    mapper = random_mapper()

    async def prefill_head(token_ids: Sequence[int], salt: str) -> KVCache:
        return native_kv(token_ids)

    target = HandoffTarget(
        pool=make_pool(target_layout),
        model="large",
        mappers=lambda: [mapper],
        prefill_head=prefill_head,
        run_step=compute.run,
        readers=Readers(SECRET),
        site=site_here(cuda=False),
        chunk_tokens=CHUNK_TOKENS,
    )
    return Pair(pool, LocalPeer(pool, "small"), target, compute)


def request(entry: CacheEntry, **changes: Any) -> TransferRequest:
    fields: dict[str, Any] = {
        "cache_id": entry.cache_id,
        "source_worker": "small-0",
        "tenant_salt": SALT,
        "deadline_ms": 20_000,
    }
    return TransferRequest(**fields | changes)


class ForgingPeer:
    """A peer with forged tickets: each field in `changes` replaces the ticket's."""

    def __init__(self, local_peer: LocalPeer, **changes: Any):
        self._inner, self._changes = local_peer, changes
        self.num_leased = self.num_released = 0

    async def lease(self, cache_id: str, request: LeaseRequest, *, timeout_s: float) -> Ticket:
        self.num_leased += 1
        ticket = await self._inner.lease(cache_id, request, timeout_s=timeout_s)
        return ticket.model_copy(update=self._changes)

    async def release(self, cache_id: str, lease_id: str, *, timeout_s: float = 2.0) -> None:
        self.num_released += 1
        await self._inner.release(cache_id, lease_id, timeout_s=timeout_s)

    async def drop(self, cache_id: str, *, timeout_s: float = 2.0) -> None:
        await self._inner.drop(cache_id, timeout_s=timeout_s)


class RemotePeer:
    """A peer in another process, which issues tickets directly."""

    def __init__(self, owner: RemoteOwner):
        self._owner = owner

    async def lease(self, cache_id: str, request: LeaseRequest, *, timeout_s: float) -> Ticket:
        return self._owner.ticket_for(cache_id, request.ttl_s)

    async def release(self, cache_id: str, lease_id: str, *, timeout_s: float = 2.0) -> None:
        raise WorkerUnavailable("killed")

    async def drop(self, cache_id: str, *, timeout_s: float = 2.0) -> None:
        raise WorkerUnavailable("killed")


class FrozenPeer:
    """A peer that stops answering, from its first call on or after a lease."""

    def __init__(self, local_peer: LocalPeer, *, after_lease: bool):
        self._inner, self._after_lease = local_peer, after_lease
        self.num_releasing = 0

    async def lease(self, cache_id: str, request: LeaseRequest, *, timeout_s: float) -> Ticket:
        if self._after_lease:
            return await self._inner.lease(cache_id, request, timeout_s=timeout_s)
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    async def release(self, cache_id: str, lease_id: str, *, timeout_s: float = 2.0) -> None:
        self.num_releasing += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.num_releasing -= 1

    async def drop(self, cache_id: str, *, timeout_s: float = 2.0) -> None:
        await asyncio.Event().wait()


async def until(condition: Callable[[], bool], what: str, timeout_s: float = 10.0) -> None:
    """Wait for a condition that another thread or task fulfils."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"timed out after {timeout_s} s: {what}"
        await asyncio.sleep(0.002)
