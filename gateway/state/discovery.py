"""Workers that are found by their heartbeats, beside those of the configuration."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import structlog

from gateway.settings import WorkerSettings
from gateway.snapshot import Gateway
from workers.api.tasks import repeating

if TYPE_CHECKING:
    from workers.api.heartbeat import Board, Heartbeat, Living

log = structlog.get_logger()


@asynccontextmanager
async def discovering(gateway: Gateway, url: str | None, secret: str) -> AsyncIterator[None]:
    """Within the block the gateway takes up workers that come, and lets go of those whose beats have ended. `url` leads
    to the board, with its password."""
    settings = gateway.settings.discovery
    if settings is None or url is None:
        yield
        return
    from workers.api.heartbeat import Board, Living  # imports redis, which a gateway without discovery may not need

    board = Board(url, secret)
    try:
        async with repeating(_Discovery(gateway, board, Living(settings.lost_after_s)).look, settings.beat_s):
            yield
    finally:
        await board.aclose()


class _Discovery:
    def __init__(self, gateway: Gateway, board: Board, living: Living):
        self._gateway = gateway
        self._board = board
        self._living = living
        self._noted: dict[str, Heartbeat] = {}

    async def look(self) -> None:
        """Where the board cannot be read, whoever was there goes on."""
        try:
            await self._take_up(self._living.update(await self._board.read(), time.monotonic()).values())
            self._gateway.metrics.registry_op("heartbeats", "ok")
        except Exception as error:  # whatever it is, the next look comes
            self._gateway.metrics.registry_op("heartbeats", "error")
            log.info("discovery_failed", error=repr(error))

    async def _take_up(self, beats: Iterable[Heartbeat]) -> None:
        of_known_tiers = [beat for beat in beats if beat.tier in self._gateway.parts.fleet.tiers]
        found = {beat.worker: WorkerSettings(tier=beat.tier, url=beat.url) for beat in of_known_tiers}
        await self._gateway.found(found)
        for beat in of_known_tiers:
            if self._noted.get(beat.worker) != beat:  # else the worker may have told of a later epoch since
                self._note_epoch(beat)
        self._noted = {beat.worker: beat for beat in of_known_tiers}

    def _note_epoch(self, beat: Heartbeat) -> None:
        worker = self._gateway.parts.fleet.worker(beat.worker)
        if worker is not None and worker.client.url == beat.url:
            worker.note_epoch(beat.epoch)
