"""`SourceReader`: the source's blocks for one handoff, read by the fastest transport that works.

    exports    shm ──► tcp ──► none left: the last one's error
                │       └── opened after the one before has failed, in opening or later
                └── the next one reads a failed chunk again; chunks read and mapped before are kept

Once a transport is open, a cache that is gone or was written since is not the transport's failure: every other would
find the same. Before that it may be, since a pool's file may just not be visible here.
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
    """Raise `_TransportFailed` for errors inside, except those of the cache and the deadline."""
    try:
        yield
    except (CacheUnusable, DeadlineExceeded):
        raise
    except KvrelayError as error:
        raise _TransportFailed(error) from error


class SourceReader:
    """For use on one event loop. `copy_s` counts the seconds of fetching over a network, `copy_bytes` the memory for
    it. `kind` is the open transport."""

    def __init__(self, target: HandoffTarget, peer: str, ticket: Ticket, job: Job[Any]):
        """Raises `TransferFailed` if no transport reaches the source."""
        self.copy_s = 0.0
        self._target = target
        self._peer = peer
        self._ticket = ticket
        self._job = job
        self._exports = choose(ticket.ways, target.site)
        self._failures: list[tuple[str, KvrelayError]] = []
        self._buffer = CopyBuffer()
        self._reader: Reader | None = None

    @property
    def kind(self) -> str:
        return self._reader.export.kind if self._reader else "none"

    @property
    def copy_bytes(self) -> int:
        return self._buffer.num_bytes

    async def open(self) -> None:
        """Open the next export that works. Raises `DeadlineExceeded`, and the last export's error if none is left."""
        self._reader = None
        while self._exports:
            self._job.check()
            export = self._exports.pop(0)
            try:
                reader = self._target.readers.get_open(self._peer, export, self._ticket.layout)
                self._reader = reader or await self._on_peer_thread(export, partial(self._open, export))
                return
            except KvrelayError as error:
                self._note_failure(export.kind, error)
        (_, last), earlier = self._failures[-1], self._failures[:-1]
        if not earlier:
            raise last
        messages = "; ".join(f"{kind}: {error.message}" for kind, error in earlier)
        raise type(last)(f"{last.message} (before that, {messages})")

    async def use(self, begin: int, end: int, use: Callable[[BlockSpan], None]) -> None:
        """Call `use` with tokens `[begin, end)` on the compute thread. Raises what `open` raises, and `CacheStale`:
        what was made of the tokens is worthless then."""
        while True:
            reader = self._reader
            assert reader is not None, "a source is opened before it is used"
            try:
                if reader.uses_network:  # fetched before the step; a stream that another handoff broke is opened again
                    fetch = partial(self._fetch, reader.export, begin, end)
                    span = await self._on_peer_thread(reader.export, fetch)
                    await self._target.run_step(partial(use, span))
                else:
                    await self._target.run_step(partial(self._use_in_place, reader, begin, end, use))
                return
            except _TransportFailed as failed:
                self._note_failure(reader.export.kind, failed.error)
                await self.open()

    async def _on_peer_thread(self, export: PoolExport, work: Callable[[], R]) -> R:
        return await asyncio.wrap_future(self._target.readers.threads.submit((self._peer, export.kind), work))

    def _fetch(self, export: PoolExport, begin: int, end: int) -> BlockSpan:
        """Return a copy, valid until the next fetch."""
        started = time.perf_counter()
        try:
            with _transport_errors(), self._reading(self._open(export), begin, end) as span:
                return span
        finally:
            self.copy_s += time.perf_counter() - started

    def _use_in_place(self, reader: Reader, begin: int, end: int, use: Callable[[BlockSpan], None]) -> None:
        with ExitStack() as stack:
            with _transport_errors():
                span = stack.enter_context(self._reading(reader, begin, end))
            use(span)

    def _reading(self, reader: Reader, begin: int, end: int) -> AbstractContextManager[BlockSpan]:
        ticket, deadline = self._ticket, self._job.deadline
        return reader.reading(ticket.blocks, ticket.generations, begin, end, deadline=deadline, buffer=self._buffer)

    def _open(self, export: PoolExport) -> Reader:
        return self._target.readers.get(self._peer, export, self._ticket.layout, deadline=self._job.deadline)

    def _note_failure(self, kind: str, error: KvrelayError) -> None:
        self._failures.append((kind, error))
        self._target.transport_failed(kind, error)
