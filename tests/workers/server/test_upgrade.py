"""Mapped now, exact later."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.workers.engines import tiny
from tests.workers.server.support import QUESTION, SALT, TALK, Served, content, serving, transfer_request, until
from workers.api.schemas import Message, PrefillRequest
from workers.engines.compute import BACKGROUND, Compute
from workers.pool.entries import CacheEntry, Span
from workers.serving.upgrade import MIN_LIFE_S, Upgrader, Uses, choose_hot

IDLE_S = 0.05
NUM = 12


def mapped(cache_id: str, num_tokens: int, expires_at: float = 100.0) -> CacheEntry:
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
def test_the_hottest_that_has_room_and_time(
    uses: dict[str, int], free_blocks: int, now: float, chosen: str | None
) -> None:
    entries = [mapped("short", 32), mapped("long", 64)]
    entry = choose_hot(entries, uses, free_blocks=free_blocks, block_tokens=16, now=now)
    assert (entry.cache_id if entry else None) == chosen


def test_a_cache_on_top_inherits_the_uses_of_those_below() -> None:
    uses = Uses()
    uses.note(mapped("a", 8), mapped("b", 16))
    uses.note(mapped("b", 16), mapped("c", 24))
    uses.note(None, mapped("d", 8))
    assert uses.counts == {"a": 1, "b": 2, "c": 2}


class Watched(Compute):
    """Tells of each step of background work before it is queued."""

    def __init__(self, on_background: Callable[[int], None]):
        super().__init__(on_start=lambda: torch.set_grad_enabled(False))
        self.num_background = 0
        self._on_background = on_background

    def submit(self, step: Callable[[], Any], *, priority: int = 0) -> Future[Any]:
        if priority == BACKGROUND:
            self.num_background += 1
            self._on_background(self.num_background)
        return super().submit(step, priority=priority)


@pytest.fixture
async def pair(folder: Path, small_folder: Path, bundle: Path) -> AsyncIterator[tuple[Served, Served]]:
    async with (
        serving(small_folder, id="small") as small,
        serving(folder, id="large", peers={"small": small.app}, bundles=[bundle]) as large,
    ):
        yield small, large


async def mapped_answer(pair: tuple[Served, Served]) -> dict[str, Any]:
    small, large = pair
    ids = small.prompt()
    read = await small.client.prefill(PrefillRequest(token_ids=ids, tenant_salt=SALT), timeout_s=60)
    moved = await large.client.transfer(transfer_request(read.cache_id, num_tokens=len(ids) - 16), timeout_s=60)
    reply = await large.chat(cache_id=moved.cache_id, max_tokens=NUM)
    assert reply["kv_transfer_params"]["path"] == "mapped"
    return reply


async def test_in_idle_time_the_exact_cache_takes_the_mapped_ones_place(
    pair: tuple[Served, Served], folder: Path, reference: LlamaForCausalLM
) -> None:
    _, large = pair
    first = await mapped_answer(pair)
    upgrader = Upgrader(large.worker.engine, large.worker.pool, large.worker.metrics, IDLE_S)
    upgrader.uses = large.worker.upgrader.uses
    running = asyncio.create_task(upgrader.run())
    await until(lambda: not large.worker.pool.mapped())
    running.cancel()
    talk = [*TALK, Message(role="assistant", content=content(first)), QUESTION]
    old_id = first["kv_transfer_params"]["cache_id"]
    second = await large.chat(talk, cache_id=old_id, require_exact=True, max_tokens=NUM)
    usage = second["kv_transfer_params"]
    assert (usage["path"], usage["provenance"], usage["mapped_tokens"]) == ("exact", "exact", 0)
    assert usage["cached_tokens"] >= len(large.prompt())
    native = tiny.greedy(reference, large.prompt(talk), NUM)
    assert content(second) == large.text(native)
    told = (await large.http.get("/metrics")).text
    assert 'kvrelay_cache_upgrades_total{result="ok"} 1.0' in told
    assert 'kvrelay_answers_total{path="exact"} 1.0' in told and "kvrelay_exact_answers_ratio 0.5" in told


async def test_it_yields_to_real_work_between_two_steps(pair: tuple[Served, Served]) -> None:
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

    engine.compute.close()
    engine.compute = watched = Watched(begin)
    upgrader = Upgrader(engine, large.worker.pool, large.worker.metrics, IDLE_S)
    upgrader.uses = large.worker.upgrader.uses
    running = asyncio.create_task(upgrader.run())
    await until(lambda: bool(working))
    await asyncio.sleep(10 * IDLE_S)
    assert watched.num_background == 1 and large.worker.pool.mapped()
    release.set()
    await until(lambda: not large.worker.pool.mapped())
    running.cancel()
    assert watched.num_background > 2


@pytest.mark.parametrize("idle_s", [None, IDLE_S])
async def test_a_worker_does_so_by_itself_unless_told_not_to(
    folder: Path, small_folder: Path, bundle: Path, idle_s: float | None
) -> None:
    async with (
        serving(small_folder, id="small") as small,
        serving(folder, id="large", peers={"small": small.app}, bundles=[bundle], upgrade_idle_s=idle_s) as large,
    ):
        await mapped_answer((small, large))
        if idle_s is None:
            await asyncio.sleep(10 * IDLE_S)
            assert len(large.worker.pool.mapped()) == 2
        else:
            await until(lambda: not large.worker.pool.mapped())
