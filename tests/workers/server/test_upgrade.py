"""Upgrades: an exact cache replaces a mapped one in idle time."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.workers.engines import tiny
from tests.workers.server.support import QUESTION, SALT, TALK, ServedWorker, content, serving, transfer_request, until
from workers.api.errors import CacheNotFound, Overloaded, PoolFull
from workers.api.schemas import Message, PrefillRequest
from workers.engines.scheduling import BACKGROUND, Compute
from workers.pool.entries import CacheEntry, Span
from workers.serving.idle import MIN_LIFE_S, STEP_TOKENS, Upgrader, UsageCounts, choose_hot

IDLE_S = 0.05
NUM = 12


def mapped_entry(cache_id: str, num_tokens: int, expires_at: float = 100.0) -> CacheEntry:
    return CacheEntry(
        cache_id, tuple(range(num_tokens)), (), "", SALT, 0.0, expires_at, "mapped:b", Span(0, num_tokens)
    )


@pytest.mark.parametrize(
    ("uses", "free_blocks", "now", "chosen"),
    [
        ({}, 99, 0.0, None),
        ({"short": 1}, 99, 0.0, "short"),
        ({"short": 1, "long": 1}, 99, 0.0, "long"),
        ({"short": 2, "long": 1}, 99, 0.0, "short"),
        ({"short": 1, "long": 1}, 3, 0.0, "short"),
        ({"short": 1, "long": 1}, 1, 0.0, None),
        ({"short": 1, "long": 1}, 99, 100.0 - MIN_LIFE_S, None),
    ],
)
def test_choose_hot_picks_most_used_with_room_and_time(
    uses: dict[str, int], free_blocks: int, now: float, chosen: str | None
) -> None:
    entries = [mapped_entry("short", 32), mapped_entry("long", 64)]
    entry = choose_hot(entries, uses, free_blocks=free_blocks, block_tokens=16, now=now)
    assert (entry.cache_id if entry else None) == chosen


def test_extended_cache_inherits_use_counts() -> None:
    uses = UsageCounts()
    uses.count(mapped_entry("a", 8), mapped_entry("b", 16))
    uses.count(mapped_entry("b", 16), mapped_entry("c", 24))
    uses.count(None, mapped_entry("d", 8))
    assert uses.counts == {"a": 1, "b": 2, "c": 2}


def disable_grad() -> None:
    torch.set_grad_enabled(False)


class WatchedCompute(Compute):
    """Reports each background step before it is queued."""

    def __init__(self, on_background: Callable[[int], None]):
        super().__init__(on_start=disable_grad)
        self.num_background = 0
        self._on_background = on_background

    def submit(self, step: Callable[[], Any], *, priority: int = 0) -> Future[Any]:
        if priority == BACKGROUND:
            self.num_background += 1
            self._on_background(self.num_background)
        return super().submit(step, priority=priority)


def watched_upgrader(
    large: ServedWorker, on_background: Callable[[int], None] = lambda num_steps: None, **changes: Any
) -> tuple[Upgrader, WatchedCompute]:
    engine = large.worker.engine
    engine.compute.close()
    engine.compute = watched = WatchedCompute(on_background)
    upgrader = Upgrader(engine, large.worker.pool, large.worker.metrics, IDLE_S, **changes)
    upgrader.usage_counts = large.worker.upgrader.usage_counts
    return upgrader, watched


async def mapped_answer(pair: tuple[ServedWorker, ServedWorker], **changes: Any) -> dict[str, Any]:
    small, large = pair
    ids = small.prompt()
    prefilled = await small.client.prefill(PrefillRequest(token_ids=ids, tenant_salt=SALT), timeout_s=60)
    moved = await large.client.transfer(transfer_request(prefilled.cache_id, num_tokens=len(ids) - 16), timeout_s=60)
    reply = await large.chat(cache_id=moved.cache_id, max_tokens=NUM, **changes)
    assert reply["kv_transfer_params"]["path"] == "mapped"
    return reply


async def test_idle_upgrade_replaces_mapped_cache_by_exact(
    pair: tuple[ServedWorker, ServedWorker], folder: Path, reference: LlamaForCausalLM
) -> None:
    _, large = pair
    first = await mapped_answer(pair)
    upgrader, _ = watched_upgrader(large)
    assert await upgrader.upgrade_one() and not large.worker.pool.mapped_caches()
    talk = [*TALK, Message(role="assistant", content=content(first)), QUESTION]
    old_id = first["kv_transfer_params"]["cache_id"]
    second = await large.chat(talk, cache_id=old_id, require_exact=True, max_tokens=NUM)
    usage = second["kv_transfer_params"]
    assert (usage["path"], usage["provenance"], usage["mapped_tokens"]) == ("exact", "exact", 0)
    assert usage["cached_tokens"] >= len(large.prompt())
    native = tiny.greedy(reference, large.prompt(talk), NUM)
    assert content(second) == large.text(native)
    metrics = (await large.http.get("/metrics")).text
    assert 'kvrelay_cache_upgrades_total{result="ok"} 1.0' in metrics
    assert 'kvrelay_answers_total{path="exact"} 1.0' in metrics and "kvrelay_exact_answers_ratio 0.5" in metrics


async def test_upgrade_yields_to_requests_between_steps(pair: tuple[ServedWorker, ServedWorker]) -> None:
    _, large = pair
    await mapped_answer(pair)
    engine, release = large.worker.engine, asyncio.Event()
    working: list[asyncio.Task[None]] = []

    async def work() -> None:
        async with engine.admit():
            await release.wait()

    def begin(num_steps: int) -> None:
        if num_steps == 1:
            working.append(asyncio.create_task(work()))

    upgrader, watched = watched_upgrader(large, begin)
    running = asyncio.create_task(upgrader.run())
    await until(lambda: bool(working))
    await asyncio.sleep(10 * IDLE_S)
    assert watched.num_background == 1 and large.worker.pool.mapped_caches()
    release.set()
    await until(lambda: not large.worker.pool.mapped_caches())
    running.cancel()
    assert watched.num_background > 2


@pytest.mark.parametrize("ending", ["deleted", "expired"])
@pytest.mark.parametrize("at_last_step", [False, True])
async def test_upgrade_ends_with_its_cache(
    pair: tuple[ServedWorker, ServedWorker], ending: str, at_last_step: bool
) -> None:
    _, large = pair
    pool = large.worker.pool
    await mapped_answer(pair)
    tip = max(pool.mapped_caches(), key=lambda entry: entry.num_tokens)
    num_reads = -(-tip.num_tokens // STEP_TOKENS)
    ends_at = num_reads + 1 if at_last_step else 2

    def end(num_steps: int) -> None:
        if num_steps == ends_at and ending == "deleted":
            pool.drop(tip.cache_id, SALT)
        elif num_steps == ends_at:
            pool.sweep(now=tip.expires_at)

    upgrader, watched = watched_upgrader(large, end)
    with pytest.raises(CacheNotFound, match=f"{tip.cache_id} was deleted, replaced or expired"):
        await upgrader.upgrade_one()
    assert watched.num_background == ends_at  # only the step that had begun
    assert all(not entry.is_exact and entry is not tip for entry in pool.mapped_caches())
    assert pool.stats.num_indexed == 0 and not pool.match_prefix(tip.token_ids, SALT).blocks
    assert pool.stats.used_blocks == sum(len(entry.blocks) for entry in pool.mapped_caches())


async def test_exact_cache_keeps_the_mapped_ones_expiry(pair: tuple[ServedWorker, ServedWorker]) -> None:
    _, large = pair
    pool = large.worker.pool
    usage = (await mapped_answer(pair, ttl_s=MIN_LIFE_S + 1.0))["kv_transfer_params"]
    working: list[asyncio.Task[None]] = []

    async def work() -> None:
        async with large.worker.engine.admit():
            await asyncio.sleep(usage["expires_at"] - time.time() - MIN_LIFE_S + 0.5)

    def begin(num_steps: int) -> None:
        if num_steps == 1:
            working.append(asyncio.create_task(work()))

    upgrader, _ = watched_upgrader(large, begin)
    assert await upgrader.upgrade_one()
    exact = pool.peek(usage["cache_id"])
    assert exact.is_exact and exact.expires_at == pytest.approx(usage["expires_at"], abs=0.1)


async def test_upgrade_evicts_nothing_when_the_pool_fills_meanwhile(pair: tuple[ServedWorker, ServedWorker]) -> None:
    _, large = pair
    pool = large.worker.pool
    await mapped_answer(pair)
    other = (await large.chat([QUESTION]))["kv_transfer_params"]["cache_id"]
    taken = ExitStack()

    def begin(num_steps: int) -> None:
        if num_steps == 2:
            taken.enter_context(pool.allocate(pool.stats.free_blocks))

    upgrader, _ = watched_upgrader(large, begin)
    with taken, pytest.raises(PoolFull):
        await upgrader.upgrade_one()
    assert pool.peek(other).is_exact and len(pool.mapped_caches()) == 2


@pytest.mark.parametrize("busy", ["requests", "compute"])
async def test_upgrade_gives_up_without_idle_time(pair: tuple[ServedWorker, ServedWorker], busy: str) -> None:
    """Either requests run all the time, or other steps always come before its own."""
    _, large = pair
    pool, engine = large.worker.pool, large.worker.engine
    await mapped_answer(pair)
    num_used, release, working = pool.stats.used_blocks, threading.Event(), ExitStack()

    def begin(num_steps: int) -> None:
        if num_steps == 2 and busy == "compute":
            working.callback(release.set)
            watched.submit(release.wait)
        elif num_steps == 2:
            engine.admission.num_running += 1
            working.callback(lambda: setattr(engine.admission, "num_running", 0))

    upgrader, watched = watched_upgrader(large, begin, max_wait_s=0.3)
    with working:
        async with asyncio.timeout(5):
            with pytest.raises(Overloaded, match="no idle time for 0.3 s to upgrade kvc-"):
                await upgrader.upgrade_one()
    assert watched.num_background == 2 and len(pool.mapped_caches()) == 2
    assert pool.stats.used_blocks == num_used and pool.stats.num_indexed == 0


@pytest.mark.parametrize("idle_s", [None, IDLE_S])
async def test_worker_upgrades_unless_disabled(
    folder: Path, small_folder: Path, bundle: Path, idle_s: float | None
) -> None:
    async with (
        serving(small_folder, id="small") as small,
        serving(folder, id="large", peers={"small": small.app}, bundles=[bundle], upgrade_idle_s=idle_s) as large,
    ):
        await mapped_answer((small, large))
        if idle_s is None:
            await asyncio.sleep(10 * IDLE_S)
            assert len(large.worker.pool.mapped_caches()) == 2
        else:
            await until(lambda: not large.worker.pool.mapped_caches())
