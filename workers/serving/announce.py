"""This worker's heartbeats, and the peers whose heartbeats it sees."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import structlog
from redis.exceptions import RedisError

from workers.api.heartbeat import Board, Heartbeat, LiveWorkers
from workers.api.tasks import repeating
from workers.serving.worker import Worker

log = structlog.get_logger()


@asynccontextmanager
async def announced(worker: Worker, secret: str, url: str) -> AsyncIterator[None]:
    """Within the block others find the worker at `url`, if it is configured so."""
    settings, board_url = worker.settings.discovery, worker.settings.board_url
    if settings is None or board_url is None:
        yield
        return
    board = Board(board_url, secret)
    announcer = _Announcer(worker, board, LiveWorkers(settings.lost_after_s), url)
    try:
        async with repeating(announcer.beat, settings.beat_s):
            yield
        with suppress(RedisError):
            await board.remove(worker.settings.id)
    finally:
        await board.aclose()


class _Announcer:
    def __init__(self, worker: Worker, board: Board, living: LiveWorkers, url: str):
        self._worker = worker
        self._board = board
        self._living = living
        self._url = url
        self._is_well = True

    async def beat(self) -> None:
        """One beat, and a look at those of others. What fails is logged once, until all is well again."""
        try:
            await self._tell()
            await self._look()
            self._is_well = True
        except Exception as error:  # whatever it is, the next beat comes
            if self._is_well:
                log.warning("heartbeat_failed", error=repr(error))
            self._is_well = False

    async def _tell(self) -> None:
        own, epoch = self._worker.settings, self._worker.pool.epoch
        if not self._worker.draining:
            await self._board.put(Heartbeat(worker=own.id, tier=own.tier, url=self._url, epoch=epoch, at=time.time()))

    async def _look(self) -> None:
        beats = self._living.update(await self._board.read(), time.monotonic())
        urls = {name: beat.url for name, beat in beats.items() if name != self._worker.settings.id}
        await self._worker.transfers.meet(urls)
