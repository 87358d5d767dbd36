"""`Run`: carries out the steps of one turn, and delivers the answer.

    step = next_step(turn)  ──►  attempt = turn.begin(step)  ──►  call the worker  ──►  result or error
         ▲                                                                                    │
         └────────────────────────────────────────────────────────────────────────────────────┘

`steps.py` decides. This module owns what must be closed at the end: the answer streams and the early transfer.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Literal

import structlog

from gateway.errors import CircuitOpen
from gateway.policies import TokenLogprob, Verdict
from gateway.request import bodies
from gateway.request.route import Parts
from gateway.request.steps import early_transfer, max_gap_s, next_step
from gateway.request.turn import (
    Answer,
    Attempt,
    CacheRef,
    Deliver,
    Escalate,
    Fail,
    Judge,
    Prefill,
    Step,
    Transfer,
    Turn,
)
from gateway.state.tenants import Tenant
from gateway.upstream.completion import Chunk, Completion
from gateway.upstream.deadline import Deadline
from gateway.upstream.stream import AnswerStream
from gateway.upstream.worker import Worker
from workers.api import tracing
from workers.api.errors import CacheUnusable, KvrelayError
from workers.api.schemas import Path, TransferReply, TransferRequest
from workers.api.tasks import cancel_and_wait

log = structlog.get_logger()


class Run:
    """One turn. Call either `chunks` or `whole`, once and in one task; ending it early stops every worker."""

    def __init__(self, parts: Parts, turn: Turn):
        self.turn = turn
        self._parts = parts
        self._metrics = parts.metrics
        self._early: asyncio.Task[CacheRef] | None = None  # of `turn.early`
        self._transfers_to_close: list[asyncio.Task[CacheRef]] = []

    async def chunks(self) -> AsyncGenerator[list[Chunk], None]:
        """The answering worker's chunks; those that arrived together are given out together. Raises `KvrelayError`."""
        async with self._closing():
            stream = await self._next_answer()
            self._count_first_token(stream)
            before = stream.last_at
            async for chunks in stream:
                if stream.last_at > before:
                    gap_s = stream.last_at - before
                    self._metrics.inter_token_latency.labels(stream.worker.tier).observe(gap_s)
                before = stream.last_at
                yield chunks
            await self._finish(stream)

    async def whole(self) -> Completion:
        """The whole answer. One that breaks off was not sent yet: another may take its place."""
        async with self._closing():
            while True:
                stream = await self._next_answer()
                delivery = self.turn.attempts[-1]
                if isinstance(delivery.step, Deliver) and delivery.step.can_be_replaced:
                    stream.max_gap_s = max_gap_s(self.turn)
                try:
                    with delivery:
                        await stream.finish()
                    break
                except KvrelayError as error:
                    delivery.error = error
                    log.info("attempt_failed", step="deliver", tier=stream.worker.tier, code=error.code)
            delivery.usage = stream.completion.kv
            self._count_first_token(stream)
            await self._finish(stream)
            return stream.completion

    async def _next_answer(self) -> AnswerStream:
        """Take steps until an answer is under way that may be delivered."""
        turn = self.turn
        while True:
            # 1. Decide
            step, before = next_step(turn), turn.fallback
            if isinstance(step, Fail):
                raise step.error
            if turn.early is not None and not _leads_to(step, turn.early):
                self._drop_early()
            attempt = turn.begin(step)
            if len(turn.attempts) == 1 and turn.route.decision.route != "cascade":
                self._count_decision(turn.route.decision.route)
            if isinstance(step, (Answer, Deliver)) and step.fallback not in (None, before):
                self._metrics.full_prefill_fallback.labels(step.fallback.reason).inc()
                log.info("fell_back", reason=step.fallback.reason)

            # 2. Carry out
            try:
                match step:
                    case Prefill():
                        attempt.cache = await self._prefill(attempt, step)
                    case Answer():
                        attempt.stream = await self._answer(attempt, step)
                    case Judge():
                        with attempt:
                            attempt.verdict = await self._judge(attempt, step)
                    case Escalate():
                        if turn.answering is not None:
                            await turn.answer_stream.aclose()
                    case Transfer():
                        with attempt:
                            attempt.cache = await (self._join_early() if step.is_early else self._transfer(step))
                    case Deliver():
                        attempt.usage = turn.answer_stream.completion.kv  # sent with the first chunk, if at all
                        return turn.answer_stream

            # 3. Note what failed
            except KvrelayError as error:
                attempt.error = error
                log.info("attempt_failed", step=type(step).__name__.lower(), tier=step.tier.name, code=error.code)
                if isinstance(error, CacheUnusable):
                    await self._forget(step)
            attempt.ended_at = time.monotonic()

    # Steps

    async def _prefill(self, attempt: Attempt, step: Prefill) -> CacheRef:
        turn, lookup = self.turn, self.turn.lookups[step.tier.name]
        nearest = lookup.best(exact_only=True)
        preferred = nearest.entry.worker if nearest else None
        with attempt:
            while attempt.cache is None:
                worker = await step.tier.choose(preferred=preferred, wait=step.wait)
                with suppress(CircuitOpen):  # another call took the probe
                    request = bodies.prefill(turn, step.deadline)
                    reply = await worker.prefill(request, step.deadline, attempt.begin)
                    path: Path = "exact" if reply.cached_tokens else "prefill"
                    attempt.cache = CacheRef(worker, reply.cache_id, reply.num_tokens, path, prefill=reply)
        num_tokens = reply.num_tokens
        cache_access(turn.tenant, "written", worker=worker.id, cache_id=reply.cache_id, num_tokens=num_tokens)
        await self._parts.prefixes.file_prompt(turn.tenant, lookup, worker.id, reply)
        return attempt.cache

    async def _transfer(self, step: Transfer) -> CacheRef:
        turn, source = self.turn, step.source
        request = bodies.transfer(turn, step)
        reply, took_s = await counted_transfer(self._parts, step.worker, request, step.deadline)
        cache_access(
            turn.tenant,
            "transferred",
            worker=step.worker.id,
            cache_id=reply.cache_id,
            num_tokens=reply.num_tokens,
            source=source.cache_id,
        )
        return CacheRef(
            step.worker,
            reply.cache_id,
            reply.num_tokens,
            path="hybrid" if reply.decision == "hybrid" else "mapped",
            transfer=reply,
            transfer_ms=took_s * 1000,
            is_shadowed=random.random() < turn.settings.shadow.share,
        )

    async def _answer(self, attempt: Attempt, step: Answer) -> AnswerStream:
        turn, cache = self.turn, step.cache
        if cache is not None:
            cache_access(turn.tenant, "read", worker=cache.worker.id, cache_id=cache.cache_id)
        with attempt:
            while True:
                worker = cache.worker if cache else await step.tier.choose(avoid=step.avoid, wait=step.wait)
                attempt.worker = worker
                try:
                    return await worker.open_answer(
                        bodies.answer(turn, step),
                        first_deadline=step.deadline,
                        deadline=turn.deadline,
                        wait=step.wait if cache else None,
                        on_begun=attempt.begin,
                    )
                except CircuitOpen:  # another call took the probe: choose again
                    if cache is not None:
                        raise

    async def _judge(self, attempt: Attempt, step: Judge) -> Verdict:
        """Judge the answer's first tokens, fewer if they leave no doubt; or the model's reply to the policy's question
        about its answer. If an escalation is likely, its transfer starts meanwhile."""
        turn, policy = self.turn, self.turn.route.policy
        stream = turn.answer_stream
        tokens: list[TokenLogprob] = stream.completion.tokens
        forecast = policy.forecast(tokens)
        while forecast != "certain" and await stream.read_on(policy.num_judged_tokens, step.deadline):
            forecast = policy.forecast(tokens)
            if forecast == "likely" and (transfer := early_transfer(turn, step.above)) is not None:
                turn.early = transfer
                self._early = asyncio.create_task(self._transfer(transfer))
        if policy.follow_up is not None:
            request = bodies.follow_up(turn, stream.completion, policy.follow_up, step.deadline)
            cache_id = request.fields["kv_transfer_params"]["cache_id"]
            if cache_id is not None:
                cache_access(turn.tenant, "read", worker=stream.worker.id, cache_id=cache_id)
            attempt.stream = await stream.worker.open_answer(
                request,
                first_deadline=step.deadline,
                deadline=step.deadline,
                wait=step.wait,
                on_begun=attempt.begin,
            )
            await attempt.stream.finish()
            tokens = attempt.stream.completion.tokens[:1]
        else:
            tokens = tokens[: policy.num_judged_tokens]
        verdict = policy.judge(tokens)
        if verdict.confidence is not None:
            self._metrics.cascade_confidence.observe(verdict.confidence)
        self._count_decision("accept" if verdict.accept else "escalate", verdict.reason)
        return verdict

    async def _join_early(self) -> CacheRef:
        task, self._early = self._early, None
        self.turn.early = None
        assert task is not None
        self._transfers_to_close.append(task)  # closed at the end, if this is cancelled
        self._metrics.early_handoffs.labels("used").inc()
        return await task

    def _drop_early(self) -> None:
        """No escalation to its tier follows. A cache that is there already is left to expire: equal transfers share
        one, so that another request may be answering from it."""
        assert self._early is not None
        self._early.cancel()
        self._transfers_to_close.append(self._early)
        self._early, self.turn.early = None, None
        self._metrics.early_handoffs.labels("dropped").inc()

    async def _forget(self, step: Step) -> None:
        """The worker does not hold the step's cache: drop it from this turn's lookup and from the registry."""
        lost = step.source if isinstance(step, Transfer) else step.cache if isinstance(step, Answer) else None
        if lost is not None and lost.hit is not None:
            tier = lost.worker.tier
            self.turn.lookups[tier] = self.turn.lookups[tier].without(lost.hit)
            await self._parts.prefixes.forget(tier, lost.hit)

    # Metrics and the end

    def _count_decision(self, decision: str, reason: str | None = None) -> None:
        chosen = self.turn.route.decision
        self._metrics.cascade_decisions.labels(chosen.policy, decision, reason or chosen.reason).inc()

    def _count_first_token(self, stream: AnswerStream) -> None:
        """The answer is being delivered: no other will take its place."""
        turn = self.turn
        path = "fallback" if turn.fallback else turn.path
        self._metrics.first_token(stream.worker.tier, path, (turn.ttft_ms or 0.0) / 1000, turn.overhead_ms / 1000)

    async def _finish(self, stream: AnswerStream) -> None:
        """The extended cache is filed for the next turn; the worker's rates and the metrics are updated."""
        turn, usage, tier = self.turn, stream.completion.kv, stream.worker.tier
        if usage is not None:
            stream.worker.note_usage(usage, stream.completion.num_prompt_tokens)
        if turn.stores and (lookup := turn.lookups.get(tier)) is not None:
            is_chat, stable = turn.request.is_chat, turn.num_stable
            await self._parts.prefixes.file_answer(turn.tenant, lookup, stream, is_chat=is_chat, num_stable=stable)
        prefill_s = usage.prefill_ms / 1000 if usage is not None else None
        self._metrics.answered(tier, time.monotonic() - turn.arrived_at, prefill_s)

    @asynccontextmanager
    async def _closing(self) -> AsyncGenerator[None, None]:
        """However it ends: every worker still at work is stopped, and the turn's cost is charged."""
        turn, parts = self.turn, self._parts
        with parts.shares.one(turn.tenant.name):
            try:
                if turn.stores and not turn.lookups:
                    await look_up(parts, turn)
                yield
            finally:
                try:
                    await self._close()
                finally:
                    cost = turn.cost()
                    await parts.charge(turn.tenant, cost.num_read, cost.num_written, by_tier=cost.by_tier)

    async def _close(self) -> None:
        if self._early is not None:
            self._drop_early()
        open_streams = [stream for stream in self.turn.streams if not stream.is_closed]
        if open_streams or self._transfers_to_close:  # mostly there are none
            async with AsyncExitStack() as closing:
                for stream in open_streams:
                    closing.push_async_callback(stream.aclose)
                for task in self._transfers_to_close:
                    closing.push_async_callback(cancel_and_wait, task)
        for attempt in self.turn.attempts:
            kept = attempt.stream.completion.kv if attempt.stream and isinstance(attempt.step, Answer) else None
            if attempt.stream is not None and kept is not None and kept.cache_id is not None:
                worker, num_tokens = attempt.stream.worker.id, kept.num_tokens
                tenant = self.turn.tenant
                cache_access(tenant, "written", worker=worker, cache_id=kept.cache_id, num_tokens=num_tokens)


def _leads_to(step: Step, early: Transfer) -> bool:
    """Whether this step is on the way to the early transfer."""
    return isinstance(step, (Judge, Escalate, Transfer)) and early.tier is (
        step.above if isinstance(step, Judge) else step.tier
    )


async def look_up(parts: Parts, turn: Turn) -> None:
    """Fill `turn.lookups` for every tier that may be asked. Raises `InvalidRequest`."""
    request = turn.request
    with tracing.span("prefix"):
        turn.lookups = await parts.prefixes.look_up(
            turn.messages, request.offered_tools, turn.tenant, turn.route.tiers, is_chat=request.is_chat
        )


async def counted_transfer(
    parts: Parts, worker: Worker, request: TransferRequest, deadline: Deadline
) -> tuple[TransferReply, float]:
    """The worker's reply, and how long it took in seconds. The result is counted, whatever it is."""
    started = time.monotonic()
    try:
        reply = await worker.transfer(request, deadline)
    except CircuitOpen:
        raise  # no worker was called
    except KvrelayError as error:
        parts.metrics.handoffs.labels(error.code).inc()
        raise
    took_s = time.monotonic() - started
    parts.metrics.handed_over(took_s, reply.num_tokens / worker.prefill_tokens_per_s)
    return reply, took_s


def cache_access(
    tenant: Tenant,
    access: Literal["written", "read", "transferred"],
    *,
    worker: str,
    cache_id: str,
    num_tokens: int | None = None,
    source: str | None = None,
) -> None:
    """Audit log: one line each time a request touches a cache; never its contents. `source` is the cache that a
    transferred one was made from."""
    fields = {"num_tokens": num_tokens, "source": source}
    log.info(
        "cache_access",
        access=access,
        tenant=tenant.name,
        worker=worker,
        cache_id=cache_id,
        **{key: value for key, value in fields.items() if value is not None},
    )
