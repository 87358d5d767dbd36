"""`AnswerStream`: an answer that a worker is writing."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from gateway.upstream.completion import Chunk, Completion
from gateway.upstream.deadline import Deadline
from workers.api import tracing
from workers.api.client import Chunks
from workers.api.errors import KvrelayError, WorkerUnavailable

if TYPE_CHECKING:
    from gateway.upstream.worker import Slot, Worker

ALL = sys.maxsize  # chunks


class AnswerStream:
    """An async iterator over the worker's chunks, which `completion` accumulates on the way.

    Chunks that were read ahead (to see that there is an answer, or to judge it) are held and given out in order. The
    worker's slot is released as soon as the answer is complete or the stream is closed. Raises `KvrelayError` only.
    """

    def __init__(self, worker: Worker, chunks: Chunks, slot: Slot, deadline: Deadline, completion: Completion):
        self.worker = worker
        self.completion = completion
        self.first_at: float | None = None  # time of the first content, from time.monotonic()
        self.last_at = 0.0  # time of the latest chunk
        self.max_gap_s: float | None = None  # between two chunks; None: only the deadline counts
        self.is_closed = False
        self._chunks = chunks
        self._slot = slot
        self.span = tracing.begin("decode")
        self._deadline = deadline
        self._received: deque[Chunk] = deque()  # not yet added to `completion`
        self._held: list[Chunk] = []  # added, not yet given out

    @property
    def has_ended(self) -> bool:
        return self._chunks.has_ended and not self._received

    async def read_on(self, num_tokens: int, deadline: Deadline) -> bool:
        """Read one more chunk. False if there are `num_tokens` already, or the answer has ended."""
        if len(self.completion.tokens) >= num_tokens or self.has_ended:
            return False
        await self.pull(deadline)
        return True

    async def __aiter__(self) -> AsyncIterator[list[Chunk]]:
        """Chunks that arrived together are given out together."""
        while self._held or not self.has_ended:
            if self._held:
                chunks, self._held = self._held, []
                yield chunks
            else:
                await self.pull(self._gap_deadline, max_chunks=ALL)

    async def finish(self) -> None:
        """Read to the end, for `completion`."""
        while not self.has_ended:
            await self.pull(self._gap_deadline, max_chunks=ALL)
        self._held.clear()

    @property
    def _gap_deadline(self) -> Deadline:
        return self._deadline if self.max_gap_s is None else Deadline.after(self.max_gap_s)

    async def aclose(self, error: BaseException | None = None) -> None:
        """Stop the worker if the answer is not complete, and release its slot. `error` is what ended the answer."""
        if self.is_closed:
            return
        self.is_closed = True
        try:
            await self._chunks.aclose()
        finally:
            self.span.end()
            self._slot.release(error)

    async def pull(self, deadline: Deadline, *, max_chunks: int = 1) -> None:
        """Add the next chunks to the completion and hold them; at the end there are none."""
        try:
            if not self._received:
                self._received.extend(await self._chunks.read(deadline.earlier(self._deadline).remaining_s))
                self.last_at = time.monotonic()
            for index in range(min(max_chunks, len(self._received))):
                try:
                    self.completion.add(self._received[0])
                except (KeyError, TypeError, ValueError, AttributeError) as error:
                    if index:  # the good chunks before it are delivered first
                        break
                    kind = type(error).__name__
                    raise WorkerUnavailable(f"{self.worker.id} sent a malformed chunk ({kind})") from error
                if self.completion.has_content and self.first_at is None:
                    self.first_at = self.last_at
                    self._slot.succeed()
                self._held.append(self._received.popleft())
        except KvrelayError as error:
            await self.aclose(error)
            raise
        if self.has_ended:
            await self.aclose()
