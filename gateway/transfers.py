"""A cache of one tier's worker, mapped into the pool of another's: asked for, counted, told."""

from __future__ import annotations

import random
import time

from gateway import asks
from gateway.audit import cache_access
from gateway.course import Course
from gateway.errors import CircuitOpen
from gateway.handoff import Transfer
from gateway.metrics import Metrics
from gateway.sources import Handed, Read
from gateway.upstream.deadline import Deadline
from gateway.upstream.worker import Worker
from workers.api.errors import CacheUnusable, KvrelayError
from workers.api.schemas import TransferReply, TransferRequest


async def transferred(course: Course, source: Read, worker: Worker, plan: Transfer) -> Handed:
    """As `plan` says, into the pool of `worker`. A source that its worker does not hold is forgotten."""
    turn, parts = course.turn, course.parts
    by = Deadline.after(plan.budget_s).earlier(turn.deadline)
    request = asks.transfer(
        turn,
        parts.settings.handoff,
        cache_id=source.cache_id,
        source_worker=source.worker.id,
        num_tokens=plan.num_tokens,
        by=by,
    )
    try:
        reply, took_s = await counted(parts.metrics, worker, request, by)
    except CacheUnusable:
        if source.found is not None:
            await parts.prefixes.forget(turn, source.worker.tier, source.found)
        raise
    made, count = reply.cache_id, reply.num_tokens
    cache_access(turn.tenant, "transferred", worker=worker.id, cache_id=made, num_tokens=count, source=source.cache_id)
    return Handed(worker, reply, took_s)


async def counted(
    metrics: Metrics, worker: Worker, request: TransferRequest, by: Deadline
) -> tuple[TransferReply, float]:
    """What the worker made, and how long that took in seconds. Whatever comes of it stands in the metrics."""
    started = time.monotonic()
    try:
        reply = await worker.transfer(request, by)
    except CircuitOpen:
        raise  # nobody was asked
    except KvrelayError as error:
        metrics.handoffs.labels(error.code).inc()
        raise
    took_s = time.monotonic() - started
    metrics.handed_over(took_s, reply.num_tokens / worker.prefill_tokens_per_s)
    return reply, took_s


def note_handed(course: Course, handed: Handed) -> None:
    """The answer will be over this cache; a share of such answers is compared with native ones."""
    course.turn.report.transferred(handed.reply, handed.took_s * 1000)
    course.turn.is_shadowed = random.random() < course.parts.settings.shadow.share
