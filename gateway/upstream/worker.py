"""One worker as the gateway sees it: its client, its circuits, epoch and rates; and `Stream`, an answer under way."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from gateway.errors import CircuitOpen, NoUsableWorker
from gateway.gathered import Chunk, Gathered
from gateway.settings import Deadlines
from gateway.texts import ChatChunks
from gateway.upstream.breaker import Attempt, Breaker, State, until_one_admits
from gateway.upstream.deadline import Deadline
from gateway.upstream.limits import Gate
from workers.api import tracing
from workers.api.client import Chunks, WorkerClient
from workers.api.errors import KvrelayError, WorkerUnavailable
from workers.api.schemas import (
    KVUsage,
    PrefillReply,
    PrefillRequest,
    TransferReply,
    TransferRequest,
    WorkerInfo,
)

POLL_TIMEOUT_S = 2.0
MISSES_UNTIL_DOWN = 2  # one late answer on a busy machine is no reason to leave a worker out
EWMA_WEIGHT = 0.3
ASSUMED_MAP_SPEEDUP = 10  # of mapping over reading, until it is measured
ALL = sys.maxsize  # chunks
MIN_MEASURED_TOKENS = 32  # fewer tell more of the overhead than of the rate


@dataclass(frozen=True)
class Question:
    """To be answered: the `fields` of a `ChatRequest`, or of a `CompletionRequest`, as plain JSON. They are ours, and
    not checked before they are sent."""

    is_chat: bool
    fields: dict[str, Any]

    @property
    def cache_id(self) -> str | None:
        """The cache that it is to be answered from."""
        cache_id: str | None = self.fields["kv_transfer_params"]["cache_id"]
        return cache_id


class Worker:
    """Calls one worker, within its tier's bounds. Raises `KvrelayError` only.

    Transfers have a circuit of their own: that they fail says little about the worker's answering, since the cause
    often is the source. A call that its circuit does not let through fails at once; `patience` is for an answer that
    nobody else could give: until then it waits, in the tier's queue, for the circuit to let it through.
    """

    def __init__(
        self,
        worker_id: str,
        tier: str,
        client: WorkerClient,
        *,
        gate: Gate,
        breaker: Breaker,
        transfers: Breaker,
        times: Deadlines,
        on_restart: Callable[[str], None] = lambda worker_id: None,
    ):
        self.id = worker_id
        self.tier = tier
        self.client = client
        self.breaker = breaker
        self.transfers = transfers
        self.info: WorkerInfo | None = None
        self.epoch: str | None = None
        self.num_in_flight = 0  # calls, other than looks
        self.num_begun = 0
        self._on_restart = on_restart
        self._gate = gate
        self._times = times
        self._is_drained = False
        self._misses = 0
        self._prefill_rate: float | None = None
        self._map_rate: float | None = None

    @property
    def is_up(self) -> bool:
        """Answered when last looked at. A worker that nobody has looked at yet is thought to be."""
        return self._misses < MISSES_UNTIL_DOWN

    @property
    def is_drained(self) -> bool:
        """An operator wants it left alone."""
        return self._is_drained

    @is_drained.setter
    def is_drained(self, is_drained: bool) -> None:
        self._is_drained = is_drained
        self.breaker.bell.ring()

    @property
    def is_usable(self) -> bool:
        return self.is_in_service and self.breaker.admits

    @property
    def is_ready(self) -> bool:
        """Was seen to be well, and its circuit is not open: while that is half open, calls wait for its trials."""
        return self.is_in_service and self.info is not None and self.breaker.state is not State.OPEN

    @property
    def is_in_service(self) -> bool:
        """Nothing but its circuit keeps calls away."""
        return self.is_up and not self.is_drained

    @property
    def prefill_tokens_per_s(self) -> float:
        told = self.info.rates.prefill_tokens_per_s if self.info else None
        return told or self._prefill_rate or self._times.assumed_prefill_tokens_per_s

    @property
    def knows_its_pace(self) -> bool:
        """Whether its prefill rate was measured."""
        return self._prefill_rate is not None or bool(self.info and self.info.rates.prefill_tokens_per_s)

    @property
    def map_tokens_per_s(self) -> float:
        told = self.info.rates.map_tokens_per_s if self.info else None
        return told or self._map_rate or ASSUMED_MAP_SPEEDUP * self.prefill_tokens_per_s

    def learn_from(self, other: Worker) -> None:
        """What is known of the same process: all but its circuits."""
        self.info, self.epoch, self._misses = other.info, other.epoch, other._misses
        self._prefill_rate, self._map_rate = other._prefill_rate, other._map_rate
        self._is_drained = other._is_drained

    async def look(self) -> None:
        """Asks how the worker is; its epoch tells whether it restarted meanwhile."""
        try:
            info = await Deadline.after(POLL_TIMEOUT_S).bound("info", self.client.info(timeout_s=POLL_TIMEOUT_S))
            if not await self.client.ready(timeout_s=POLL_TIMEOUT_S):
                raise WorkerUnavailable(f"{self.id} is not ready")
        except KvrelayError:
            self._missed(MISSES_UNTIL_DOWN if self.info is None else self._misses + 1)
            return
        self.info = info
        self._missed(0)
        self.note_epoch(info.epoch)

    def _missed(self, misses: int) -> None:
        was_up, self._misses = self.is_up, misses
        if self.is_up != was_up:
            self.breaker.bell.ring()

    def note_epoch(self, epoch: str) -> None:
        if self.epoch is not None and epoch != self.epoch:
            self._on_restart(self.id)
        self.epoch = epoch

    async def prefill(
        self, request: PrefillRequest, by: Deadline, on_begun: Callable[[], None] = lambda: None
    ) -> PrefillReply:
        """`on_begun` is called once it has a place."""
        with await self._admitted(self.breaker, by), tracing.span("prefill"):
            on_begun()
            reply = await by.bound("prefill", self.client.prefill(request, timeout_s=by.remaining_s))
        self.note_epoch(reply.epoch)
        self._note_prefill(reply.num_tokens - reply.cached_tokens, reply.prefill_ms)
        return reply

    async def transfer(self, request: TransferRequest, by: Deadline) -> TransferReply:
        with await self._admitted(self.transfers, by), tracing.span("transfer"):
            reply = await by.bound("transfer", self.client.transfer(request, timeout_s=by.remaining_s))
        self.note_epoch(reply.epoch)
        num_mapped = reply.num_tokens - reply.reused_tokens
        if num_mapped >= MIN_MEASURED_TOKENS and reply.total_ms > 0:
            self._map_rate = _ewma(self._map_rate, num_mapped / reply.total_ms * 1000)
        return reply

    async def open_answer(
        self,
        question: Question,
        *,
        first_by: Deadline,
        deadline: Deadline,
        patience: Deadline | None = None,
        on_begun: Callable[[], None] = lambda: None,
    ) -> Stream:
        """An answer whose first content has arrived. Whoever opened it closes it. `on_begun` is called once it has a
        place."""
        admission = await self._admitted(self.breaker, first_by, patience)
        on_begun()
        stream = Stream(self, self._chunks(question, max(deadline.remaining_s, 0.001)), admission, deadline)
        try:
            await stream.start(first_by)
        except BaseException as error:
            await stream.aclose(error)
            raise
        return stream

    def _chunks(self, question: Question, timeout_s: float) -> Chunks | ChatChunks:
        if question.is_chat:
            return self.client.chat_stream(question.fields, timeout_s=timeout_s)
        return ChatChunks(self.client.completion_stream(question.fields, timeout_s=timeout_s))

    def note_usage(self, usage: KVUsage, num_prompt_tokens: int) -> None:
        self.note_epoch(usage.epoch)
        self._note_prefill(num_prompt_tokens - usage.cached_tokens - usage.mapped_tokens, usage.prefill_ms)

    def _note_prefill(self, num_tokens: int, prefill_ms: float) -> None:
        if num_tokens >= MIN_MEASURED_TOKENS and prefill_ms > 0:
            self._prefill_rate = _ewma(self._prefill_rate, num_tokens / prefill_ms * 1000)

    async def _admitted(self, circuit: Breaker, by: Deadline, patience: Deadline | None = None) -> Admission:
        """A place in the tier by then, and the circuit's leave."""
        while True:
            if patience is not None and not circuit.admits:
                await self._until_admits(circuit, patience)
            await self._gate.enter(by)
            try:
                if patience is None or circuit.admits:
                    return Admission(self, self._gate, circuit.attempt())
            except CircuitOpen:
                self._gate.leave()
                raise
            self._gate.leave()  # another was faster, or it opened meanwhile

    async def _until_admits(self, circuit: Breaker, patience: Deadline) -> None:
        """Raises `NoUsableWorker` where that is in vain."""
        with self._gate.queued():
            if await until_one_admits(lambda: [circuit] if self.is_in_service else [], patience):
                return
        raise NoUsableWorker(f"{self.id} is not usable now", retry_after_s=circuit.retry_after_s)


class Admission:
    """A call under way: its place in the tier and its circuit's attempt, both given back where it ends."""

    def __init__(self, worker: Worker, gate: Gate, attempt: Attempt):
        self._worker = worker
        self._gate = gate
        self._attempt = attempt
        worker.num_in_flight += 1
        worker.num_begun += 1

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end(error)

    def succeed(self) -> None:
        """The worker does its work, however the call ends."""
        self._attempt.succeed()

    def end(self, error: BaseException | None) -> None:
        """To be called once."""
        self._attempt.end(error)
        self._worker.num_in_flight -= 1
        self._gate.leave()


class Stream:
    """An answer under way: an async iterator over the worker's chunks, and what they tell on the way.

    What has been read ahead (to see that there is an answer, or to judge it) is held, and given out in order.
    """

    def __init__(self, worker: Worker, chunks: Chunks | ChatChunks, admission: Admission, deadline: Deadline):
        self.worker = worker
        self.first_at: float | None = None  # its first content; these are instants of time.monotonic()
        self.last_at = 0.0  # when something came last
        self.max_gap_s: float | None = None  # between two chunks; None: up to the deadline
        self.is_closed = False
        self.answer = Gathered()
        self._chunks = chunks
        self._admission = admission
        self._span = tracing.begin("decode")
        self._deadline = deadline
        self._arrived: deque[Chunk] = deque()  # together with the latest that was read
        self._held: list[Chunk] = []

    @property
    def has_ended(self) -> bool:
        return self._chunks.has_ended and not self._arrived

    async def start(self, by: Deadline) -> None:
        """Reads until the first content has arrived (or the end: an answer may be empty)."""
        with self._span.entered():
            while self.first_at is None and not self.has_ended:
                await self._pull(by)

    async def read_on(self, num_tokens: int, by: Deadline) -> bool:
        """Reads the next chunk; False where that is not needed for so many tokens, or the answer has ended."""
        if len(self.answer.tokens) >= num_tokens or self.has_ended:
            return False
        await self._pull(by)
        return True

    async def __aiter__(self) -> AsyncIterator[list[Chunk]]:
        """As many chunks at a time as came together."""
        while self._held or not self.has_ended:
            if self._held:
                piece, self._held = self._held, []
                yield piece
            else:
                await self._pull(self._next_by, most=ALL)

    async def read_out(self) -> None:
        """Reads what is left, for `answer`."""
        while not self.has_ended:
            await self._pull(self._next_by, most=ALL)
        self._held.clear()

    @property
    def _next_by(self) -> Deadline:
        return self._deadline if self.max_gap_s is None else Deadline.after(self.max_gap_s)

    async def aclose(self, error: BaseException | None = None) -> None:
        """Hangs up where the answer is not yet whole, and gives the place back; `error` is what ended it."""
        if self.is_closed:
            return
        self.is_closed = True
        try:
            await self._chunks.aclose()
        finally:
            self._span.end()
            self._admission.end(error)

    async def _pull(self, by: Deadline, *, most: int = 1) -> None:
        """Holds what comes next, at most so many chunks. At the end there is nothing."""
        try:
            if not self._arrived:
                await self._wait(by)
            self._take(most)
        except KvrelayError as error:
            await self.aclose(error)
            raise
        if self.has_ended:
            await self.aclose()  # its place is free, whatever becomes of the answer

    async def _wait(self, by: Deadline) -> None:
        self._arrived.extend(await self._chunks.read(by.earlier(self._deadline).remaining_s))
        self.last_at = time.monotonic()

    def _take(self, most: int) -> None:
        """What comes before a chunk that is none is told first."""
        for taken in range(min(most, len(self._arrived))):
            try:
                self._read(self._arrived[0])
            except WorkerUnavailable:
                if taken:
                    return
                raise
            self._held.append(self._arrived.popleft())

    def _read(self, chunk: Chunk) -> None:
        try:
            self.answer.add(chunk)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise WorkerUnavailable(f"{self.worker.id} sent a chunk that is none ({type(error).__name__})") from error
        if self.answer.has_content and self.first_at is None:
            self.first_at = self.last_at
            self._admission.succeed()


def _ewma(before: float | None, measured: float) -> float:
    return measured if before is None else (1 - EWMA_WEIGHT) * before + EWMA_WEIGHT * measured
