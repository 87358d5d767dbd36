"""`Source`: the source's blocks for one handoff, by the fastest transport that works.

    ways    shm ──► tcp ──► none left: the last one's error
             │       └── opened when the one before has failed, to open or in the middle
             └── a chunk that failed is read again by the next; what was read and mapped before stands

Once a way is open, a cache that is gone or was written since is no transport's failure: no other would find it
otherwise. One that does not open says little, as a pool's file may only be out of sight here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from mappers.cache import KVCache
from workers.api.errors import CacheUnusable, DeadlineExceeded, KvrelayError
from workers.api.schemas import PoolExport, Ticket
from workers.handoff.target import HandoffTarget
from workers.sharing import Job
from workers.transports import choose
from workers.transports.base import Reader, Room


class _ReadFailed(Exception):
    def __init__(self, error: KvrelayError):
        super().__init__(error.message)
        self.error = error


class Source:
    """For use on one event loop. `copy_s` is what reading has taken, and `kind` the transport that reads."""

    def __init__(self, target: HandoffTarget, peer: str, ticket: Ticket, job: Job[Any]):
        """Raises `TransferFailed` if no transport leads to the source."""
        self.copy_s = 0.0
        self._target = target
        self._peer = peer
        self._ticket = ticket
        self._job = job
        self._ways = choose(ticket.ways, target.site)
        self._failures: list[tuple[str, KvrelayError]] = []
        self._room = Room()
        self._reader: Reader | None = None

    @property
    def kind(self) -> str:
        return self._reader.export.kind if self._reader else "none"

    async def open(self) -> None:
        """Open the next way that works. Raises the last one's error if none is left, `DeadlineExceeded`."""
        self._reader = None
        while self._ways:
            self._job.check()
            way = self._ways.pop(0)
            try:
                self._reader = await asyncio.to_thread(self._open, way)
                return
            except KvrelayError as error:
                self._note(way.kind, error)
        raise self._all_failed()

    async def use(self, begin: int, end: int, use: Callable[[KVCache], None]) -> None:
        """Tokens `[begin, end)`, given to `use` on the compute thread. Errors as `open`, and `CacheStale`."""
        while True:
            reader = self._reader
            assert reader is not None, "a source is opened before it is used"
            try:
                return await self._use(reader, begin, end, use)
            except _ReadFailed as failed:
                self._note(reader.export.kind, failed.error)
                await self.open()

    async def _use(self, reader: Reader, begin: int, end: int, use: Callable[[KVCache], None]) -> None:
        """Memory is read by the step that uses it, which others' steps cannot come between; what must be waited for is
        not waited for there. A stream that another handoff has broken is opened anew."""
        if reader.waits:
            again = partial(self._open, reader.export)
            chunk = await asyncio.to_thread(self._read, again, begin, end, self._room)
            await self._target.run_step(partial(use, chunk))
        else:
            await self._target.run_step(lambda: use(self._read(lambda: reader, begin, end)))

    def _open(self, way: PoolExport) -> Reader:
        return self._target.readers.get(self._peer, way, self._ticket.layout, deadline=self._job.deadline)

    def _read(self, opened: Callable[[], Reader], begin: int, end: int, room: Room | None = None) -> KVCache:
        ticket, started = self._ticket, time.perf_counter()
        try:
            return opened().read(
                ticket.blocks, ticket.generations, begin, end, deadline=self._job.deadline, room=room
            )
        except (CacheUnusable, DeadlineExceeded):
            raise
        except KvrelayError as error:
            raise _ReadFailed(error) from error
        finally:
            self.copy_s += time.perf_counter() - started

    def _note(self, kind: str, error: KvrelayError) -> None:
        self._failures.append((kind, error))
        self._target.transport_failed(kind, error)

    def _all_failed(self) -> KvrelayError:
        """What the last way said, and after it the others."""
        (_, last), before = self._failures[-1], self._failures[:-1]
        if not before:
            return last
        told = "; ".join(f"{kind}: {error.message}" for kind, error in before)
        return type(last)(f"{last.message} (before that, {told})")
