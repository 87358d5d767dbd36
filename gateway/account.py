"""What is told, counted and remembered of a request on its way."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

import structlog

from gateway.course import Course
from gateway.gathered import Chunk
from gateway.policies import Verdict
from gateway.upstream.worker import Stream

log = structlog.get_logger()


class Account:
    """Of one request: its report, its metrics, its log lines, and the cache that is filed for the turn after."""

    def __init__(self, course: Course):
        self._course = course
        self._turn = course.turn
        self._report = course.turn.report
        self._metrics = course.parts.metrics

    def decided(self, decision: str) -> None:
        self._metrics.cascade_decisions.labels(self._report.policy, decision, self._report.reason).inc()

    def judged(self, verdict: Verdict) -> Verdict:
        self._report.confidence, self._report.reason = verdict.confidence, verdict.reason
        if verdict.confidence is not None:
            self._metrics.cascade_confidence.observe(verdict.confidence)
        self.decided("accept" if verdict.accept else "escalate")
        return verdict

    def fell_back(self, reason: str) -> None:
        """One that fails again for the same reason is one fallback."""
        self._turn.drop_handoff()
        path = f"fallback:{reason}"
        if self._report.path != path:
            self._report.path = path
            self._metrics.full_prefill_fallback.labels(reason).inc()
            log.info("fell_back", reason=reason)

    def began(self, stream: Stream) -> None:
        usage = stream.answer.kv
        if usage is not None:  # told with the first chunk; a stream's header then says what its body will
            self._report.found(usage, by_small=self._is_by_small(stream))
        self.settled_on(stream)

    def settled_on(self, stream: Stream) -> None:
        """This is the answer that is told, unless it breaks off."""
        turn, now = self._turn, time.monotonic()
        turn.began(now)
        turn.report.tier = stream.worker.tier
        turn.model = self._course.parts.fleet.tiers[stream.worker.tier].model
        if turn.escalated_at is not None and not self._is_by_small(stream):
            turn.report.handoff_ttft_ms = ((stream.first_at or now) - turn.escalated_at) * 1000

    def told(self) -> None:
        """Something of the answer is now, or all of it: there will be no other in its place."""
        self._metrics.began(self._report, self._turn.overhead_ms)

    async def timed(self, stream: Stream) -> AsyncIterator[list[Chunk]]:
        """Its chunks as they came, with the time between them measured."""
        before = stream.last_at
        async for piece in stream:
            if stream.last_at > before:
                self._metrics.inter_token_latency.labels(stream.worker.tier).observe(stream.last_at - before)
            before = stream.last_at
            yield piece

    async def ended(self, stream: Stream) -> None:
        """The extended cache, for the turn after; and what the worker told of its work."""
        turn, usage = self._turn, stream.answer.kv
        if usage is not None:
            self._report.answered(usage, by_small=self._is_by_small(stream), may_rename=not turn.request.stream)
            stream.worker.note_usage(usage, stream.answer.num_prompt_tokens)
        if turn.stores:
            await self._course.parts.prefixes.file_answer(turn, stream)
        self._metrics.ended(self._report, turn.since_arrival_ms(time.monotonic()))

    def _is_by_small(self, stream: Stream) -> bool:
        return stream.worker.tier == self._course.small.name
