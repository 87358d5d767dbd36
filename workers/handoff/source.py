"""`SourceReader`: the source's blocks for one handoff, by the fastest transport that works.

    ways    shm ──► tcp ──► none left: the last one's error
             │       └── opened when the one before has failed, to open or in the middle
             └── a chunk that failed is read again by the next; what was read and mapped before stands

Once a way is open, a cache that is gone or was written since is no transport's failure: no other would find it
otherwise. One that does not open says little, as a pool's file may only be out of sight here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, TypeVar

from workers.api.errors import CacheUnusable, DeadlineExceeded, KvrelayError
from workers.api.schemas import PoolExport, Ticket
from workers.handoff.target import HandoffTarget
from workers.pool.blocks import BlockSpan
from workers.sharing import Job
from workers.transports import choose
from workers.transports.base import CopyBuffer, Reader

R = TypeVar("R")


class _TransportFailed(Exception):
    def __init__(self, error: KvrelayError):
        super().__init__(error.message)
        self.error = error


@contextmanager
def _transport_errors() -> Iterator[None]:
    """What fails here is the transport's failure, unless it is the cache's or the time's."""
    try:
        yield
    except (CacheUnusable, DeadlineExceeded):
        raise
    except KvrelayError as error:
        raise _TransportFailed(error) from error


class SourceReader:
    """For use on one event loop. `copy_s` is what fetching has taken, `copy_bytes` the memory for what was fetched, and
    `kind` the transport that reads."""

    def __init__(self, target: HandoffTarget, peer: str, ticket: Ticket, job: Job[Any]):
        """Raises `TransferFailed` if no transport leads to the source."""
        self.copy_s = 0.0
        self._target = target
        self._peer = peer
        self._ticket = ticket
        self._job = job
        self._ways = choose(ticket.ways, target.site)
        self._failures: list[tuple[str, KvrelayError]] = []
        self._room = CopyBuffer()
        self._reader: Reader | None = None

    @property
    def kind(self) -> str:
        return self._reader.export.kind if self._reader else "none"

    @property
    def copy_bytes(self) -> int:
        return self._room.num_bytes

    async def open(self) -> None:
        """Open the next way that works. Raises the last one's error if none is left, `DeadlineExceeded`."""
        self._reader = None
        while self._ways:
            self._job.check()
            way = self._ways.pop(0)
            try:
                at_hand = self._target.readers.at_hand(self._peer, way, self._ticket.layout)
                self._reader = at_hand or await self._waited_for(way, partial(self._open, way))
                return
            except KvrelayError as error:
                self._note(way.kind, error)
        raise self._all_failed()

    async def use(self, begin: int, end: int, use: Callable[[BlockSpan], None]) -> None:
        """Tokens `[begin, end)`, given to `use` on the compute thread. Errors as `open`, and `CacheStale`: what was
        made of them is worthless then."""
        while True:
            reader = self._reader
            assert reader is not None, "a source is opened before it is used"
            try:
                return await self._use(reader, begin, end, use)
            except _TransportFailed as failed:
                self._note(reader.export.kind, failed.error)
                await self.open()

    async def _use(self, reader: Reader, begin: int, end: int, use: Callable[[BlockSpan], None]) -> None:
        """Memory is read by the step that uses it, where it lies; what must be waited for is fetched before. A stream
        that another handoff has broken is opened anew."""
        if reader.waits:
            span = await self._waited_for(reader.export, partial(self._fetched, reader.export, begin, end))
            await self._target.run_step(partial(use, span))
        else:
            await self._target.run_step(partial(self._use_in_place, reader, begin, end, use))

    async def _waited_for(self, way: PoolExport, work: Callable[[], R]) -> R:
        return await asyncio.wrap_future(self._target.readers.threads.submit((self._peer, way.kind), work))

    def _fetched(self, way: PoolExport, begin: int, end: int) -> BlockSpan:
        """A copy, which stands until the next is fetched."""
        started = time.perf_counter()
        try:
            with _transport_errors(), self._reading(self._open(way), begin, end) as span:
                return span
        finally:
            self.copy_s += time.perf_counter() - started

    def _use_in_place(self, reader: Reader, begin: int, end: int, use: Callable[[BlockSpan], None]) -> None:
        with ExitStack() as held:
            with _transport_errors():
                span = held.enter_context(self._reading(reader, begin, end))
            use(span)

    def _reading(self, reader: Reader, begin: int, end: int) -> AbstractContextManager[BlockSpan]:
        ticket, deadline = self._ticket, self._job.deadline
        return reader.reading(ticket.blocks, ticket.generations, begin, end, deadline=deadline, room=self._room)

    def _open(self, way: PoolExport) -> Reader:
        return self._target.readers.get(self._peer, way, self._ticket.layout, deadline=self._job.deadline)

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
