from __future__ import annotations

from pathlib import Path

import pytest

from mappers.cache import KVCache
from tests.workers.handoff.support import (
    SOURCE_LAYOUT,
    TARGET_LAYOUT,
    Pair,
    RemotePeer,
    make_pair,
    native_kv,
    random_mapper,
    request,
    until,
)
from tests.workers.pool.support import SALT, random_kv
from tests.workers.transports.owner import RemoteOwner
from workers.api.errors import CacheMismatch
from workers.api.schemas import TransferReply, TransferRequest
from workers.digest import token_digest
from workers.handoff import chunks
from workers.pool.entries import Span
from workers.pool.segment import reclaim_dead_segments


def handed_over(pair: Pair, reply: TransferReply) -> KVCache:
    with pair.target.pool.hold(reply.cache_id, SALT) as held:
        return pair.target.pool.gather(held.blocks, 0, held.num_tokens)


def offline(num_tokens: int, head: int, source: KVCache) -> KVCache:
    """Make the same cache without pools, chunks and blocks."""
    mapped = random_mapper().map(source.slice(head, num_tokens))
    return KVCache.concatenate([native_kv(range(head)), mapped]) if head else mapped


def num_mappings(name: str, mode: str) -> int:
    return sum(name in line and mode in line for line in Path("/proc/self/maps").read_text().splitlines())


@pytest.mark.parametrize("kind", ["inproc", "shm"])
@pytest.mark.parametrize(
    ("stored", "requested", "head"), [(50, None, 4), (50, 41, 4), (17, 16, 0), (33, 33, 20), (9, 8, 7)]
)
async def test_handed_over_kv_equals_offline_replay(kind: str, stored: int, requested: int | None, head: int) -> None:
    pair = make_pair(kind)
    entry = pair.source_cache(stored)
    reply = await pair.handoffs.transfer(request(entry, num_tokens=requested, native_head=head), peer=pair.local_peer)
    num_tokens = requested or stored
    expected = offline(num_tokens, head, random_kv(0, stored))
    found = handed_over(pair, reply)
    assert found.num_tokens == reply.num_tokens == num_tokens
    for a, b in zip(found.keys + found.values, expected.keys + expected.values, strict=True):
        # Chunks and whole caches sum in other orders: a few units in the last place of sums of 32 products.
        assert (a - b).abs().max() < 1e-5
    await pair.handoffs.aclose()
    pair.close()


async def test_reply_describes_the_handoff(pair: Pair) -> None:
    entry = pair.source_cache(50)
    reply = await pair.handoffs.transfer(request(entry, num_tokens=40, ttl_s=77), peer=pair.local_peer)
    cache = pair.target.pool.get(reply.cache_id, SALT)
    assert reply.digest == cache.digest == token_digest(range(40), SALT)
    assert reply.provenance == cache.provenance == f"mapped:{reply.mapper}"
    assert reply.mapper == random_mapper().bundle_id
    assert reply.epoch == pair.target.pool.epoch
    assert reply.expires_at == cache.expires_at == pytest.approx(cache.created_at + 77)
    assert reply.bytes == 36 * SOURCE_LAYOUT.num_layers * 2 * SOURCE_LAYOUT.num_kv_heads * SOURCE_LAYOUT.head_dim * 4
    parts = reply.phases_ms.values()
    assert all(part > 0 for part in parts) and sum(parts) <= reply.total_ms


async def test_scratch_memory_is_independent_of_length(pair: Pair) -> None:
    replies = [await pair.handoffs.transfer(request(pair.source_cache(n)), peer=pair.local_peer) for n in (60, 200)]
    scratch = [reply.scratch_bytes for reply in replies]
    assert scratch[0] == scratch[1] > 0


async def test_new_cache_is_mapped_and_not_exact(pair: Pair) -> None:
    entry = pair.source_cache(48)
    reply = await pair.handoffs.transfer(request(entry), peer=pair.local_peer)
    pool = pair.target.pool
    cache = pool.get(reply.cache_id, SALT)
    assert cache.mapped == Span(4, 48)
    assert pool.match_prefix(cache.token_ids, SALT).blocks == ()
    with pytest.raises(CacheMismatch):
        pool.get(reply.cache_id, SALT, require_exact=True)


async def test_lease_is_released(pair: Pair) -> None:
    entry = pair.source_cache(48)
    await pair.handoffs.transfer(request(entry), peer=pair.local_peer)
    await until(lambda: pair.source.stats.num_leases == 0, "the lease's end")


async def test_source_is_leased_until_last_chunk(pair: Pair) -> None:
    entry = pair.source_cache(48)
    counts: list[int] = []
    pair.before_steps(lambda i: counts.append(pair.source.stats.num_leases))
    await pair.handoffs.transfer(request(entry), peer=pair.local_peer)
    assert set(counts) == {1}


async def test_cache_dropped_while_leased_is_handed_over(pair: Pair) -> None:
    """The lease alone keeps the blocks of an evicted, expired or deleted cache."""
    entry = pair.source_cache(48)
    pair.before_steps(lambda i: pair.source.drop(entry.cache_id, SALT) if i == 3 else None)
    reply = await pair.handoffs.transfer(request(entry), peer=pair.local_peer)
    expected = offline(48, 4, random_kv(0, 48))
    assert (handed_over(pair, reply).keys[2] - expected.keys[2]).abs().max() < 1e-5
    await until(lambda: pair.source.stats.free_blocks == pair.source.stats.num_blocks, "the source's blocks")


@pytest.mark.slow
async def test_source_killed_during_handoff_leaves_readable_memory(pair: Pair) -> None:
    """Mapped memory outlives its owner, which writes no more: reads are correct or stale."""
    owner = RemoteOwner("shm", num_blocks=64)
    try:
        ticket = owner.ticket(200, seed=6)
        pair.before_steps(lambda i: owner.kill() if i == 5 else None)
        transfer = TransferRequest(
            cache_id=ticket.cache_id, source_worker="small-0", tenant_salt=SALT, deadline_ms=60_000
        )
        reply = await pair.handoffs.transfer(transfer, peer=RemotePeer(owner))
    finally:
        owner.kill()
        reclaim_dead_segments()
    expected, found = offline(200, 4, random_kv(0, 200, seed=6)), handed_over(pair, reply)
    assert max(float((a - b).abs().max()) for a, b in zip(found.keys, expected.keys, strict=True)) < 1e-5
    pair.target.readers.sweep()
    assert not num_mappings(str(ticket.pool.address["name"]), "r--s")
    await pair.handoffs.aclose()


async def test_other_steps_run_between_chunks(pair: Pair) -> None:
    entry = pair.source_cache(100)
    order: list[str] = []

    def other(i: int) -> None:
        order.append("chunk")
        pair.compute.submit(lambda: order.append("decode"))

    pair.before_steps(other)
    await pair.handoffs.transfer(request(entry), peer=pair.local_peer)
    await pair.compute.run(lambda: None)
    assert order.count("chunk") == 2 + 7  # allocation, head; 100 tokens in chunks of 16
    assert all(a != b for a, b in zip(order, order[1:], strict=False))


async def test_source_pool_is_opened_once() -> None:
    pair = make_pair("shm")
    for seed in (0, 500):
        await pair.handoffs.transfer(request(pair.source_cache(40, seed=seed)), peer=pair.local_peer)
    assert num_mappings(str(pair.source.export().address["name"]), "r--s") == 1
    await pair.handoffs.aclose()
    pair.close()


async def test_half_precision_source_is_mapped_to_float32() -> None:
    pair = make_pair(layout=SOURCE_LAYOUT.model_copy(update={"dtype": "float16"}))
    reply = await pair.handoffs.transfer(request(pair.source_cache(40)), peer=pair.local_peer)
    whole = random_kv(0, 40)
    half = KVCache(tuple(k.half().float() for k in whole.keys), tuple(v.half().float() for v in whole.values))
    expected = offline(40, 4, half)
    found = handed_over(pair, reply)
    assert found.keys[0].dtype.is_floating_point and TARGET_LAYOUT.dtype == "float32"
    assert (found.keys[1] - expected.keys[1]).abs().max() < 1e-5
    await pair.handoffs.aclose()
    pair.close()


@pytest.mark.parametrize(
    ("begin", "end", "cut"),
    [
        (4, 50, [(4, 16), (16, 32), (32, 48), (48, 50)]),
        (0, 16, [(0, 16)]),
        (16, 17, [(16, 17)]),
        (20, 32, [(20, 32)]),
    ],
)
def test_chunks_are_cut_at_multiples(begin: int, end: int, cut: list[tuple[int, int]]) -> None:
    assert chunks(begin, end, 16) == cut
