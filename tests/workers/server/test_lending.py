"""A worker with a TCP export and a host tier: its info, metrics, leases and recalls of evicted caches."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.workers.server.support import SALT, ServedWorker, serving, transfer_request
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
async def small(small_folder: Path) -> AsyncIterator[ServedWorker]:
    """A worker that exports over TCP, with room for one prompt of 3 blocks and a host tier."""
    sizes: dict[str, Any] = {"pool_bytes": 4 * BLOCK_BYTES, "host_tier_bytes": 64 * BLOCK_BYTES}
    async with serving(small_folder, id="small", tcp=TcpSettings(), **sizes) as served:
        yield served


async def prefill(served: ServedWorker, first: int) -> PrefillReply:
    ids = [first, *range(4, 80)]
    return await served.client.prefill(PrefillRequest(token_ids=ids, tenant_salt=SALT), timeout_s=60)


async def metrics(served: ServedWorker) -> str:
    return (await served.http.get("/metrics")).text


async def test_info_lists_exports_and_metrics_count_leases(small: ServedWorker, folder: Path, bundle: Path) -> None:
    async with serving(folder, id="large", peers={"small": small.app}, bundles=[bundle]) as large:
        source, target = await small.client.info(), await large.client.info()
        assert target.site and [way.kind for way in choose(source.exports, target.site)] == ["shm", "tcp"]
        cache_id = (await prefill(small, 3)).cache_id
        moved = await large.client.transfer(transfer_request(cache_id, num_tokens=60), timeout_s=60)
    assert moved.transport == "shm"
    text = await metrics(small)
    for event, count in (("granted", 1), ("released", 1), ("expired", 0), ("refused", 0)):
        assert f'kvrelay_kv_lease_events_total{{event="{event}"}} {count}.0' in text
    assert "kvrelay_kv_leases 0.0" in text


async def test_missing_shm_file_falls_back_to_tcp_and_releases_source(
    small: ServedWorker, folder: Path, bundle: Path
) -> None:
    (SHM / str((await small.client.info()).exports[0].address["name"])).unlink()
    async with serving(folder, id="large", peers={"small": small.app}, bundles=[bundle], release_source=True) as large:
        cache_id = (await prefill(small, 3)).cache_id
        moved = await large.client.transfer(transfer_request(cache_id, num_tokens=60), timeout_s=60)
        assert moved.transport == "tcp"
        assert 'kvrelay_kv_transport_failures_total{reason="cache_stale",transport="shm"} 1.0' in await metrics(large)
    with pytest.raises(CacheNotFound):
        await small.client.cache(cache_id)
    assert small.worker.pool.stats.used_blocks == 0


async def test_evicted_cache_is_recalled_for_prompt_lease_and_deletion(small: ServedWorker) -> None:
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


async def test_host_tier_smaller_than_a_block_is_rejected_and_leaves_no_segment(small_folder: Path) -> None:
    with pytest.raises(InvalidRequest, match=f"host_tier_bytes is {BLOCK_BYTES - 1}; one block"):
        async with serving(small_folder, id="lending-3", host_tier_bytes=BLOCK_BYTES - 1):
            pass
    assert not list(SHM.glob("*lending-3*"))


async def test_recall_is_skipped_past_its_deadline_or_behind_a_full_queue(small: ServedWorker) -> None:
    evicted_id = (await prefill(small, 3)).cache_id
    await prefill(small, 2)
    engine, pool = small.worker.engine, small.worker.pool
    recalls, resume = Recaller(engine, pool, max_waiting=1), threading.Event()
    recall = partial(recalls.for_prompt, (), SALT, KVTransferParams(cache_id=evicted_id))
    blocker = engine.compute.submit(lambda: resume.wait(10))
    first = asyncio.create_task(recall())
    late = asyncio.create_task(recall(deadline=time.monotonic() + 0.2))
    await asyncio.sleep(0)
    await recall()  # returns at once: the queue is full
    await late
    assert not first.done() and pool.find_evicted((), SALT, evicted_id)
    resume.set()
    await first
    assert blocker.result() and pool.peek(evicted_id).cache_id == evicted_id


async def test_taken_tcp_port_is_reported_and_leaves_no_segment(small: ServedWorker, small_folder: Path) -> None:
    (_, tcp) = (await small.client.info()).exports
    port = int(tcp.address["port"])
    with pytest.raises(SettingsError, match=f"cannot listen on 127.0.0.1:{port} to lend blocks: .*in use"):
        async with serving(small_folder, id="lending-2", tcp=TcpSettings(port=port)):
            pass
    assert not list(SHM.glob("*lending-2*"))
