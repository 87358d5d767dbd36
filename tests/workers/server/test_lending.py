"""A worker that lends over TCP and keeps what it evicts, by its own calls: what it tells, counts and brings back."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.workers.server.support import SALT, Served, serving, transfer_request
from workers.api.config import SettingsError
from workers.api.errors import CacheNotFound, InvalidRequest
from workers.api.schemas import KVTransferParams, LeaseRequest, PrefillReply, PrefillRequest
from workers.pool.segment import SHM
from workers.serving.reuse import Recaller
from workers.settings import TcpSettings
from workers.transports import choose

LEASE = LeaseRequest(ttl_s=5, tenant_salt=SALT)
BLOCK_BYTES = 2 * 2 * 32 * 2 * 12 * 4  # of the small model


@pytest.fixture
async def small(small_folder: Path) -> AsyncIterator[Served]:
    """It lends over TCP, has room for one prompt of 3 blocks, and a second tier."""
    sizes: dict[str, Any] = {"pool_bytes": 4 * BLOCK_BYTES, "host_tier_bytes": 64 * BLOCK_BYTES}
    async with serving(small_folder, id="small", tcp=TcpSettings(), **sizes) as served:
        yield served


async def prefill(served: Served, first: int) -> PrefillReply:
    ids = [first, *range(4, 80)]
    return await served.client.prefill(PrefillRequest(token_ids=ids, tenant_salt=SALT), timeout_s=60)


async def metrics(served: Served) -> str:
    return (await served.http.get("/metrics")).text


async def test_the_ways_to_a_pool_and_its_leases_are_told(small: Served, folder: Path, bundle: Path) -> None:
    async with serving(folder, id="large", peers={"small": small.app}, bundles=[bundle]) as large:
        there, here = await small.client.info(), await large.client.info()
        assert here.site and [way.kind for way in choose(there.exports, here.site)] == ["shm", "tcp"]
        cache_id = (await prefill(small, 3)).cache_id
        moved = await large.client.transfer(transfer_request(cache_id, num_tokens=60), timeout_s=60)
    assert moved.transport == "shm"
    told = await metrics(small)
    for event, count in (("granted", 1), ("released", 1), ("expired", 0), ("refused", 0)):
        assert f'kvrelay_kv_lease_events_total{{event="{event}"}} {count}.0' in told
    assert "kvrelay_kv_leases 0.0" in told


async def test_without_its_file_a_pool_is_read_over_the_stream_and_released_then(
    small: Served, folder: Path, bundle: Path
) -> None:
    (SHM / str((await small.client.info()).exports[0].address["name"])).unlink()
    async with serving(
        folder, id="large", peers={"small": small.app}, bundles=[bundle], release_source=True
    ) as large:
        cache_id = (await prefill(small, 3)).cache_id
        moved = await large.client.transfer(transfer_request(cache_id, num_tokens=60), timeout_s=60)
        assert moved.transport == "tcp"
        assert 'kvrelay_kv_transport_failures_total{reason="cache_stale",transport="shm"} 1.0' in await metrics(large)
    with pytest.raises(CacheNotFound):
        await small.client.cache(cache_id)
    assert small.worker.pool.stats.used_blocks == 0


async def test_what_was_evicted_serves_its_next_request_its_lease_and_its_deletion(small: Served) -> None:
    first, other = await prefill(small, 3), await prefill(small, 2)
    with pytest.raises(CacheNotFound):
        await small.client.cache(first.cache_id)
    assert (await prefill(small, 3)).cached_tokens == 64
    assert "kvrelay_kv_cache_recalls_total 1.0" in await metrics(small)
    ticket = await small.client.lease(other.cache_id, LEASE, timeout_s=5)
    assert ticket.cache_id == other.cache_id
    await small.client.release(other.cache_id, ticket.lease_id)
    third = await prefill(small, 1)
    assert small.worker.pool.find_evicted((), SALT, other.cache_id)
    await small.client.drop(other.cache_id)
    with pytest.raises(CacheNotFound):
        await small.client.lease(other.cache_id, LEASE, timeout_s=5)
    await small.client.drop(third.cache_id)


async def test_a_second_tier_that_holds_no_block_is_told_and_leaves_nothing(small_folder: Path) -> None:
    with pytest.raises(InvalidRequest, match=f"host_tier_bytes is {BLOCK_BYTES - 1}; one block"):
        async with serving(small_folder, id="lending-3", host_tier_bytes=BLOCK_BYTES - 1):
            pass
    assert not list(SHM.glob("*lending-3*"))


async def test_a_cache_that_would_come_back_too_late_or_behind_too_many_does_not(small: Served) -> None:
    away = (await prefill(small, 3)).cache_id
    await prefill(small, 2)
    engine, pool = small.worker.engine, small.worker.pool
    recalls, go_on = Recaller(engine, pool, max_waiting=1), threading.Event()
    ask = partial(recalls.for_prompt, (), SALT, KVTransferParams(cache_id=away))
    busy = engine.compute.submit(lambda: go_on.wait(10))
    first = asyncio.create_task(ask())
    late = asyncio.create_task(ask(deadline=time.monotonic() + 0.2))
    await asyncio.sleep(0)
    await ask()  # at once
    await late
    assert not first.done() and pool.find_evicted((), SALT, away)
    go_on.set()
    await first
    assert busy.result() and pool.peek(away).cache_id == away


async def test_a_port_that_is_taken_is_told_and_leaves_nothing(small: Served, small_folder: Path) -> None:
    (_, tcp) = (await small.client.info()).exports
    port = int(tcp.address["port"])
    with pytest.raises(SettingsError, match=f"cannot lend its blocks on 127.0.0.1:{port}: .*in use"):
        async with serving(small_folder, id="lending-2", tcp=TcpSettings(port=port)):
            pass
    assert not list(SHM.glob("*lending-2*"))
