"""Copied layers go from block to block; the mapper reads the other layers from the source's blocks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch

from mappers.cache import KVCache
from mappers.manifest import LayerSpec, OutputSpec
from mappers.mapper import Mapper
from tests.workers.handoff.support import (
    CHUNK_TOKENS,
    SOURCE,
    TARGET,
    BlockingMapper,
    LocalPeer,
    Pair,
    card,
    make_pair,
    mapper_of,
    request,
    until,
)
from tests.workers.pool.support import SALT, random_kv
from tests.workers.transports.owner import SECRET
from workers.api.errors import CacheStale
from workers.api.schemas import KVLayout
from workers.handoff import chunks
from workers.pool.blocks import block_bytes
from workers.pool.pool import Pool
from workers.transports.lender import Lender

SOURCE_LAYOUT = KVLayout(num_layers=4, num_kv_heads=3, head_dim=8, block_tokens=8, dtype="float32")
TARGET_LAYOUT = SOURCE_LAYOUT.model_copy(update={"num_layers": 6})
NUM, HEAD = 70, 3
ALL_KINDS = ["inproc", "shm", "tcp"]


def copy_spec(keys: int, values: int) -> LayerSpec:
    return LayerSpec(
        keys=OutputSpec(method="copy", key_layers=(keys,)), values=OutputSpec(method="copy", value_layers=(values,))
    )


def copying_mapper() -> Mapper:
    """Mix runs of copied layers and single ones, keys and values of one source layer or two, and mapped layers."""
    ridge = OutputSpec(method="ridge", key_layers=(0, 2), value_layers=(3,))
    specs = [
        copy_spec(0, 0),
        copy_spec(1, 1),
        LayerSpec(keys=ridge, values=ridge),
        copy_spec(3, 2),
        copy_spec(3, 3),
        LayerSpec(keys=OutputSpec(method="copy", key_layers=(2,)), values=ridge),
    ]
    return mapper_of(specs, card("small", SOURCE, SOURCE_LAYOUT), card("large", TARGET, TARGET_LAYOUT), seed=3)


@contextmanager
def pair_over(kind: str, layout: KVLayout = SOURCE_LAYOUT) -> Iterator[Pair]:
    """Yield a pair whose source is read by this transport only."""
    pair = make_pair("shm" if kind == "shm" else "inproc", target_layout=TARGET_LAYOUT, layout=layout)
    mapper = copying_mapper()
    pair.adjust(
        mappers=lambda: [mapper], site=pair.target.site.model_copy(update={"transports": [kind]}), prefill_head=head_of
    )
    with ExitStack() as held:
        held.callback(pair.close)
        if kind == "tcp":
            lender = Lender(pair.source.arena, SECRET)
            held.callback(lender.close)
            lender.start()
            pair.local_peer = LocalPeer(pair.source, "small", (lender.export,))
        yield pair


async def head_of(token_ids: Any, salt: str) -> KVCache:
    return random_kv(0, len(token_ids), seed=77, layout=TARGET_LAYOUT)


def scatter_free_blocks(pool: Pool, held: ExitStack) -> None:
    """Hold every second block, so that newly allocated blocks are not contiguous."""
    for index, hold in enumerate([pool.allocate(1) for _ in range(pool.stats.num_blocks)]):
        if index % 2:
            hold.release()
        else:
            held.enter_context(hold)


async def handed_over(pair: Pair) -> KVCache:
    entry = pair.source_cache(NUM)
    reply = await pair.handoffs.transfer(request(entry, native_head=HEAD), peer=pair.local_peer)
    with pair.target.pool.hold(reply.cache_id, SALT) as held:
        return pair.target.pool.gather(held.blocks, HEAD, NUM)


def mapped_offline(pair: Pair) -> KVCache:
    """Map the whole cache without pools: chunk by chunk, since a product's last bits depend on its number of rows."""
    source = random_kv(0, NUM, layout=pair.source.layout)
    if pair.source.layout.dtype == "float16":
        source = KVCache(tuple(k.half() for k in source.keys), tuple(v.half() for v in source.values))
    parts = [pair.target.mappers()[0].map(source.slice(a, b)) for a, b in chunks(HEAD, NUM, CHUNK_TOKENS)]
    return KVCache.concatenate(parts)


@pytest.mark.parametrize("kind", ALL_KINDS)
@pytest.mark.parametrize(
    ("changes", "scattered"),
    [({}, False), ({}, True), ({"block_tokens": 4}, True), ({"block_tokens": 12}, False), ({"dtype": "float16"}, True)],
)
async def test_handed_over_kv_is_bitwise_what_the_mapper_makes(
    kind: str, changes: dict[str, Any], scattered: bool
) -> None:
    with pair_over(kind, SOURCE_LAYOUT.model_copy(update=changes)) as pair, ExitStack() as held:
        for pool in (pair.source, pair.target.pool) if scattered else ():
            scatter_free_blocks(pool, held)
        found, expected = await handed_over(pair), mapped_offline(pair)
        for mine, theirs in zip(found.keys + found.values, expected.keys + expected.values, strict=True):
            assert torch.equal(mine, theirs)
        await pair.handoffs.aclose()


@pytest.mark.parametrize("kind", ["inproc", "shm"])
async def test_source_changed_during_mapping_leaves_no_cache(kind: str) -> None:
    """The mapper reads blocks in place: what it made of torn blocks is discarded."""
    with pair_over(kind) as pair:
        mapper = BlockingMapper(copying_mapper())
        pair.adjust(mappers=lambda: [mapper])
        entry = pair.source_cache(NUM)
        handoff = asyncio.create_task(pair.handoffs.transfer(request(entry), peer=pair.local_peer))
        await until(mapper.started.is_set, "the first chunk")
        with pair.source.arena.writing(entry.blocks[1:2]):
            pair.source.arena.data[entry.blocks[1]].fill_(torch.nan)
        mapper.released.set()
        with pytest.raises(CacheStale, match=f"block {entry.blocks[1]} is at generation"):
            await handoff
        await pair.handoffs.aclose()
        assert pair.num_used == pair.target.pool.stats.num_caches == pair.source.stats.num_leases == 0


async def test_memory_transports_need_no_copy_buffer() -> None:
    scratch = {}
    for kind in ALL_KINDS:
        with pair_over(kind) as pair:
            reply = await pair.handoffs.transfer(request(pair.source_cache(NUM)), peer=pair.local_peer)
            scratch[kind] = reply.scratch_bytes
            await pair.handoffs.aclose()
    chunk_bytes = CHUNK_TOKENS // SOURCE_LAYOUT.block_tokens * block_bytes(SOURCE_LAYOUT)
    assert scratch["inproc"] == scratch["shm"] == scratch["tcp"] - chunk_bytes


async def test_block_is_zero_after_last_token() -> None:
    with pair_over("inproc") as pair:
        pool = pair.target.pool
        num_tokens = pool.stats.num_blocks * TARGET_LAYOUT.block_tokens
        pool.store(range(num_tokens), random_kv(0, num_tokens, layout=TARGET_LAYOUT), SALT, ttl_s=60)
        reply = await pair.handoffs.transfer(request(pair.source_cache(NUM)), peer=pair.local_peer)
        with pool.hold(reply.cache_id, SALT) as held:
            assert not pool.arena.data[held.blocks[-1], :, :, NUM % TARGET_LAYOUT.block_tokens :].any()
        await pair.handoffs.aclose()
