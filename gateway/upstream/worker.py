"""One worker as the gateway sees it: its client, circuits, epoch, health and measured rates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from gateway.errors import CircuitOpen, NoUsableWorker
from gateway.settings import Deadlines
from gateway.upstream.breaker import Breaker, BreakerCall, State, wait_until_one_admits
from gateway.upstream.completion import Completion, TextCompletion
from gateway.upstream.deadline import Deadline
from gateway.upstream.limits import Gate
from gateway.upstream.stream import AnswerStream
from workers.api import tracing
from workers.api.client import WorkerClient
from workers.api.errors import KvrelayError, WorkerUnavailable
from workers.api.schemas import (
    KVUsage,
    PrefillReply,
    PrefillRequest,
    TransferReply,
    TransferRequest,
    WorkerInfo,
)

HEALTH_TIMEOUT_S = 2.0
MISSES_UNTIL_DOWN = 2  # one late reply on a busy machine does not take a worker out
EWMA_WEIGHT = 0.3
ASSUMED_MAP_SPEEDUP = 10  # of mapping over prefill, until it is measured
MIN_MEASURED_TOKENS = 32  # with fewer, the overhead hides the rate


@dataclass(frozen=True)
class AnswerBody:
    """The `fields` of a `ChatRequest` or a `CompletionRequest`, as plain JSON. The gateway writes them itself, so they
    are not validated before they are sent."""

    is_chat: bool
    fields: dict[str, Any]


class Worker:
    """Calls one worker within its tier's bounds. Raises `KvrelayError` only.

    Transfers have a circuit of their own: a failed transfer says little about the worker's answers, since the cause is
    often the source. A call that its circuit rejects fails at once; with a wait budget (`wait`) it first waits in the
    tier's queue, up to that deadline, for the circuit to admit it.
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
        self.num_in_flight = 0  # calls, health checks excluded
        self.num_begun = 0
        self._on_restart = on_restart
        self._gate = gate
        self._times = times
        self._is_drained = False
        self._misses = 0
        self._prefill_rate: float | None = None
        self._map_rate: float | None = None

    # State

    @property
    def is_up(self) -> bool:
        """Passed its last health checks. A worker that was not checked yet counts as up."""
        return self._misses < MISSES_UNTIL_DOWN

    @property
    def is_drained(self) -> bool:
        """Taken out of service by an operator."""
        return self._is_drained

    @is_drained.setter
    def is_drained(self, is_drained: bool) -> None:
        self._is_drained = is_drained
        self.breaker.changes.notify()

    @property
    def is_in_service(self) -> bool:
        """Up and not drained; its circuit may still reject calls."""
        return self.is_up and not self.is_drained

    @property
    def is_usable(self) -> bool:
        return self.is_in_service and self.breaker.admits

    @property
    def is_ready(self) -> bool:
        """In service, checked, and its circuit is not open: while it is half open, calls wait for its probes."""
        return self.is_in_service and self.info is not None and self.breaker.state is not State.OPEN

    @property
    def prefill_tokens_per_s(self) -> float:
        reported = self.info.rates.prefill_tokens_per_s if self.info else None
        return reported or self._prefill_rate or self._times.assumed_prefill_tokens_per_s

    @property
    def has_measured_prefill(self) -> bool:
        return self._prefill_rate is not None or bool(self.info and self.info.rates.prefill_tokens_per_s)

    @property
    def map_tokens_per_s(self) -> float:
        reported = self.info.rates.map_tokens_per_s if self.info else None
        return reported or self._map_rate or ASSUMED_MAP_SPEEDUP * self.prefill_tokens_per_s

    def learn_from(self, other: Worker) -> None:
        """Take over what is known of the same process, except its circuits."""
        self.info, self.epoch, self._misses = other.info, other.epoch, other._misses
        self._prefill_rate, self._map_rate = other._prefill_rate, other._map_rate
        self._is_drained = other._is_drained

    async def check_health(self) -> None:
        """Ask for the worker's state. A changed epoch means that it restarted."""
        try:
            async with Deadline.after(HEALTH_TIMEOUT_S).bound("info"):
                info = await self.client.info(timeout_s=HEALTH_TIMEOUT_S)
            if not await self.client.ready(timeout_s=HEALTH_TIMEOUT_S):
                raise WorkerUnavailable(f"{self.id} is not ready")
        except KvrelayError:
            self._set_misses(MISSES_UNTIL_DOWN if self.info is None else self._misses + 1)
            return
        self.info = info
        self._set_misses(0)
        self.note_epoch(info.epoch)

    def _set_misses(self, misses: int) -> None:
        was_up, self._misses = self.is_up, misses
        if self.is_up != was_up:
            self.breaker.changes.notify()

    def note_epoch(self, epoch: str) -> None:
        if self.epoch is not None and epoch != self.epoch:
            self._on_restart(self.id)
        self.epoch = epoch

    def note_usage(self, usage: KVUsage, num_prompt_tokens: int) -> None:
        self.note_epoch(usage.epoch)
        self._note_prefill(num_prompt_tokens - usage.cached_tokens - usage.mapped_tokens, usage.prefill_ms)

    def _note_prefill(self, num_tokens: int, prefill_ms: float) -> None:
        if num_tokens >= MIN_MEASURED_TOKENS and prefill_ms > 0:
            self._prefill_rate = _ewma(self._prefill_rate, num_tokens / prefill_ms * 1000)

    # Calls

    async def prefill(
        self, request: PrefillRequest, deadline: Deadline, on_begun: Callable[[], None] = lambda: None
    ) -> PrefillReply:
        """`on_begun` is called once the call has left the queue."""
        with await self._enter(self.breaker, deadline), tracing.span("prefill"):
            on_begun()
            async with deadline.bound("prefill"):
                reply = await self.client.prefill(request, timeout_s=deadline.remaining_s)
        self.note_epoch(reply.epoch)
        self._note_prefill(reply.num_tokens - reply.cached_tokens, reply.prefill_ms)
        return reply

    async def transfer(self, request: TransferRequest, deadline: Deadline) -> TransferReply:
        with await self._enter(self.transfers, deadline), tracing.span("transfer"):
            async with deadline.bound("transfer"):
                reply = await self.client.transfer(request, timeout_s=deadline.remaining_s)
        self.note_epoch(reply.epoch)
        num_mapped = reply.num_tokens - reply.reused_tokens
        if num_mapped >= MIN_MEASURED_TOKENS and reply.total_ms > 0:
            self._map_rate = _ewma(self._map_rate, num_mapped / reply.total_ms * 1000)
        return reply

    async def open_answer(
        self,
        request: AnswerBody,
        *,
        first_deadline: Deadline,
        deadline: Deadline,
        wait: Deadline | None = None,
        on_begun: Callable[[], None] = lambda: None,
    ) -> AnswerStream:
        """An answer whose first content has arrived by `first_deadline`. The caller closes it. `on_begun` is called
        once the call has left the queue."""
        slot = await self._enter(self.breaker, first_deadline, wait)
        on_begun()
        call = self.client.chat_stream if request.is_chat else self.client.completion_stream
        chunks = call(request.fields, timeout_s=max(deadline.remaining_s, 0.001))
        completion = Completion() if request.is_chat else TextCompletion()
        stream = AnswerStream(self, chunks, slot, deadline, completion)
        try:
            with stream.span.active():
                while stream.first_at is None and not stream.has_ended:  # an answer may be empty
                    await stream.pull(first_deadline)
        except BaseException as error:
            await stream.aclose(error)
            raise
        return stream

    async def _enter(self, circuit: Breaker, deadline: Deadline, wait: Deadline | None = None) -> Slot:
        """Take a slot in the tier by the deadline, and pass the circuit. Raises `CircuitOpen`, `Overloaded`, and
        `NoUsableWorker` if the wait budget runs out."""
        while True:
            if wait is not None and not circuit.admits:
                with self._gate.queued():
                    if not await wait_until_one_admits(lambda: [circuit] if self.is_in_service else [], wait):
                        raise NoUsableWorker(f"{self.id} is not usable now", retry_after_s=circuit.retry_after_s)
            await self._gate.enter(deadline)
            try:
                if wait is None or circuit.admits:
                    return Slot(self, self._gate, circuit.begin())
            except CircuitOpen:
                self._gate.leave()
                raise
            self._gate.leave()  # another call took the probe, or the circuit opened meanwhile


class Slot:
    """A call in flight: its place in the tier's gate and its circuit's call. Both are released where it ends."""

    def __init__(self, worker: Worker, gate: Gate, call: BreakerCall):
        self._worker = worker
        self._gate = gate
        self._call = call
        worker.num_in_flight += 1
        worker.num_begun += 1

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release(error)

    def succeed(self) -> None:
        """The worker does its work, however the call ends."""
        self._call.succeed()

    def release(self, error: BaseException | None) -> None:
        """Call once."""
        self._call.end(error)
        self._worker.num_in_flight -= 1
        self._gate.leave()


def _ewma(before: float | None, measured: float) -> float:
    return measured if before is None else (1 - EWMA_WEIGHT) * before + EWMA_WEIGHT * measured
