"""Discovery: workers found by their heartbeats, in addition to the configured ones."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import structlog

from gateway.settings import WorkerLocation
from gateway.snapshot import Gateway
from workers.api.tasks import repeating

if TYPE_CHECKING:
    from workers.api.heartbeat import Board, Heartbeat, LiveWorkers

log = structlog.get_logger()


@asynccontextmanager
async def discovery(gateway: Gateway, url: str | None, secret: str) -> AsyncIterator[None]:
    """Within the block, add workers that send heartbeats and drop those that stopped.

    `url` is the address of the heartbeats' Redis, with its password.
    """
    settings = gateway.settings.discovery
    if settings is None or url is None:
        yield
        return
    from workers.api.heartbeat import Board, LiveWorkers  # imports redis, which other gateways may not need

    board = Board(url, secret)
    poll = _Poll(gateway, board, LiveWorkers(settings.lost_after_s))
    try:
        async with repeating(poll.run, settings.beat_s):
            yield
    finally:
        await board.aclose()


class _Poll:
    def __init__(self, gateway: Gateway, board: Board, live: LiveWorkers):
        self._gateway = gateway
        self._board = board
        self._live = live
        self._noted: dict[str, Heartbeat] = {}

    async def run(self) -> None:
        """Read the board once. If it cannot be read, the known workers stay."""
        try:
            live = self._live.update(await self._board.read(), time.monotonic())
            await self._apply([beat for beat in live.values() if beat.tier in self._gateway.parts.fleet.tiers])
            self._gateway.metrics.registry_op("heartbeats", "ok")
        except Exception as error:  # any: the next poll must still happen
            self._gateway.metrics.registry_op("heartbeats", "error")
            log.info("discovery_failed", error=repr(error))

    async def _apply(self, beats: list[Heartbeat]) -> None:
        workers = {beat.worker: WorkerLocation(tier=beat.tier, url=beat.url) for beat in beats}
        await self._gateway.set_discovered(workers)
        for beat in beats:
            if self._noted.get(beat.worker) == beat:
                continue  # the worker may have reported a later epoch since
            worker = self._gateway.parts.fleet.worker(beat.worker)
            if worker is not None and worker.client.url == beat.url:
                worker.note_epoch(beat.epoch)
        self._noted = {beat.worker: beat for beat in beats}
