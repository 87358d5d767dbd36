"""Stand-ins for vLLM: a request, a paged cache, and an operation that packs blocks in its own way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import mappers
from mappers.cache import KVCache
from mappers.fingerprint import fingerprint
from mappers.models import run
from tests.workers.handoff.support import SOURCE, SOURCE_LAYOUT, TARGET, TARGET_LAYOUT, make_pool, random_mapper
from tests.workers.pool.support import SALT, random_kv
from workers.api.schemas import KVLayout, Ticket
from workers.engines.vllm.paged import CpuLayout, HeadRange
from workers.engines.vllm.plan import LoadTarget
from workers.engines.vllm.scheduler import SchedulerSide, create_exchange
from workers.engines.vllm.worker import PagedCache, WorkerSide
from workers.pool import create_arena, new_epoch
from workers.pool.blocks import block_bytes, blocks_for
from workers.pool.pool import Pool
from workers.pool.tickets import TicketIssuer

PAGED_TOKENS = 4  # per paged block
NUM_PAGED = 48
MAX_TOKENS = 160


@dataclass
class Request:
    """The fields of vLLM's request that the connector uses."""

    request_id: str
    prompt_token_ids: list[int] | None
    kv_transfer_params: Any
    num_computed_tokens: int = 0
    cache_salt: str | None = None


def packed_write(keys: Tensor, values: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """Replaces vLLM's operation: keys transposed within a block, values in two interleaved halves."""
    size, dim = key_cache.shape[2:]
    for row, slot in enumerate(slots.tolist()):
        block, token = divmod(slot, size)
        key_cache[block].flatten(1).view(-1, dim, size)[:, :, token] = keys[row]
        value_cache[block, :, token] = values[row].unflatten(-1, (2, dim // 2)).transpose(-1, -2).flatten(-2)


def paged_cache(layout: KVLayout, heads: HeadRange | None = None) -> PagedCache:
    heads = heads or HeadRange(0, layout.num_kv_heads)
    shape = (NUM_PAGED, heads.end - heads.begin, PAGED_TOKENS, 2 * layout.head_dim)
    layers = tuple(torch.full(shape, torch.nan) for _ in range(layout.num_layers))
    return PagedCache(layers, CpuLayout(packed_write, PAGED_TOKENS, layout.head_dim, torch.float32), heads)


def read_cache(cache: PagedCache, blocks: Sequence[int], num_tokens: int) -> KVCache:
    pairs = [cache.layout.read(layer, blocks, num_tokens) for layer in cache.layers]
    return KVCache(tuple(keys for keys, _ in pairs), tuple(values for _, values in pairs))


@dataclass
class Engine:
    """Runs steps of vLLM between both sides of the connector, with the target model of the handoff tests."""

    scheduler: SchedulerSide
    worker: WorkerSide
    cache: PagedCache
    pools: dict[str, Pool]
    blocks: dict[str, list[int]] = field(default_factory=dict)

    def arrive(self, request: Request) -> str | None:
        first = sum(len(blocks) for blocks in self.blocks.values())
        count = blocks_for(len(request.prompt_token_ids or []), PAGED_TOKENS)
        self.blocks[request.request_id] = list(range(first, first + count))
        return self.scheduler.add_request(request)

    def step(self, request: Request, num_computed: int = 0) -> set[int]:
        """Schedule the prompt beyond its computed and loaded tokens; return the blocks that failed to load."""
        matched = self.scheduler.num_loadable(request.request_id, num_computed)
        self.scheduler.blocks_assigned(request.request_id, self.blocks[request.request_id], matched)
        request.num_computed_tokens = num_computed + matched
        rest = len(request.prompt_token_ids or []) - request.num_computed_tokens
        work = self.scheduler.plan_step({request.request_id: rest}, self.blocks.__getitem__)
        self.worker.load(work)
        self.worker.save(work)
        return self.worker.take_failed_blocks()

    def settle(self, failed: set[int]) -> list[Any]:
        return self.scheduler.end_step(failed, self.worker.take_saved())

    def ticket(self, model: str, token_ids: Sequence[int], seed: int = 0) -> tuple[Ticket, KVCache]:
        """Store random KV in the pool of `small` or `large`; return a ticket on it and the KV."""
        pool = self.pools[model]
        kv = random_kv(0, len(token_ids), seed=seed, layout=pool.layout)
        entry = pool.store(tuple(token_ids), kv, SALT, ttl_s=60)
        return TicketIssuer(pool, model).ticket(pool.lease(entry.cache_id, SALT, ttl_s=60)), kv


@contextmanager
def engine() -> Iterator[Engine]:
    mapper = random_mapper()
    budget = 24 * block_bytes(TARGET_LAYOUT)
    pools = {"small": make_pool(SOURCE_LAYOUT, SOURCE), "large": make_pool(TARGET_LAYOUT, TARGET)}
    exchange = create_exchange("test-vllm", TARGET_LAYOUT, budget, TARGET)
    cache = paged_cache(TARGET_LAYOUT)
    target = LoadTarget(exchange, lambda: [mapper], ["inproc", "shm"], MAX_TOKENS)
    worker = WorkerSide(cache, [mapper], TARGET_LAYOUT)
    scheduler = SchedulerSide(target, "large", PAGED_TOKENS)
    try:
        yield Engine(scheduler, worker, cache, pools)
    finally:
        worker.close()
        scheduler.close()
        for pool in pools.values():
            pool.close()


@dataclass
class Peer:
    """A worker's pool and its ticket issuer."""

    pool: Pool
    issuer: TicketIssuer

    def ticket(self, token_ids: Sequence[int], kv: KVCache) -> Ticket:
        entry = self.pool.store(tuple(token_ids), kv, SALT, ttl_s=600)
        return self.issuer.ticket(self.pool.lease(entry.cache_id, SALT, ttl_s=600))


def peer_of(folder: Path, num_layers: int, block_tokens: int, dtype: str = "float32") -> Peer:
    layout = KVLayout(num_layers=num_layers, num_kv_heads=2, head_dim=32, block_tokens=block_tokens, dtype=dtype)
    arena = create_arena("shm", layout, 2**24, worker="test-vllm-peer", epoch=new_epoch())
    pool = Pool(arena, fingerprint(folder))
    return Peer(pool, TicketIssuer(pool, folder.name))


def replay_answer(
    bundle: Path, source: Any, target: Any, ids: list[int], handed: int, head: int, num_tokens: int
) -> list[int]:
    """The greedy tokens of `target` after `ids`, with tokens `[head, handed)` mapped from `source`."""
    cache = mappers.replay(mappers.load(bundle), source, target, ids, handed, head)
    tokens: list[int] = []
    for _ in range(num_tokens):
        _, hidden = run(target, (ids + tokens)[handed:], cache)
        tokens.append(int(target.lm_head(hidden[-1]).argmax()))
    return tokens


def params(*tickets: Ticket, publish: bool = False, **more: Any) -> dict[str, Any]:
    load = [{"ticket": ticket.model_dump()} for ticket in tickets]
    fields = {"tenant_salt": SALT, "load": load} | more
    return fields | ({"publish": {"ttl_s": 30}} if publish else {})
