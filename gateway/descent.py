"""A conversation moved down: the small model takes over what a tier above has read, where a bundle goes that way.

    turns 1-6   large reads and answers          |◄──────── its exact cache ────────►|
    turn 7      small is asked                   |head|◄───── mapped down ─────►|tail|◄─ new ─►|

A shortcut for the small model's own reading, and no more: what goes wrong is logged, and the small model reads. A
bundle on trial is asked for too: that it is refused, and for what, is how its worker learns what to try it out on.
"""

from __future__ import annotations

import structlog

from gateway.answers import Answers
from gateway.course import Course
from gateway.handoff import Rates, Transfer, has_bundle
from gateway.sources import Read
from gateway.transfers import note_handed, transferred
from gateway.upstream.deadline import Deadline
from gateway.upstream.worker import Stream, Worker
from workers.api.errors import KvrelayError

log = structlog.get_logger()

BUDGET_SHARE = 0.5  # of the small model's time


async def answer_from_above(course: Course, answers: Answers, by: Deadline) -> Stream | None:
    """The small model's answer under way, to be judged; None where no tier above has read enough more, or it failed."""
    if not course.turn.may_map or not course.small.is_usable:
        return None
    worker = course.small.pick_to_take_over()
    source = _source(course, worker)
    if source is None:
        return None
    plan = _plan(course, source, worker, by)
    try:
        with course.turn.upstream("small_prefill"):
            handed = await transferred(course, source, worker, plan)
        note_handed(course, handed)
        stream = await answers.open(worker, by, cache_id=handed.reply.cache_id, judged=True)
    except KvrelayError as error:
        log.info("descent_failed", code=error.code)
        return None
    course.turn.report.path = handed.path
    return stream


def _source(course: Course, worker: Worker) -> Read | None:
    """The longest exact cache above that spares this worker enough."""
    turn, settings = course.turn, course.parts.settings.handoff
    best = {tier: turn.known[tier.name].best(exact_only=True) for tier in course.above}
    sources = [
        Read(tier.workers[found.entry.worker], found.entry.cache_id, found.entry.num_tokens, found)
        for tier, found in best.items()
        if found is not None and has_bundle(tier.workers[found.entry.worker].info, worker.info, or_trial=True)
    ]
    source = max(sources, key=lambda one: one.num_tokens, default=None)
    own = turn.known[course.small.name].best(exact_only=True)
    spared = (source.num_tokens if source else 0) - (own.entry.num_tokens if own else 0) - settings.native_tail
    return source if spared >= settings.min_tokens else None


def _plan(course: Course, source: Read, worker: Worker, by: Deadline) -> Transfer:
    """Never longer than reading what is handed over would take."""
    num_tokens = source.num_tokens - course.parts.settings.handoff.native_tail
    native_s = Rates(worker.prefill_tokens_per_s, worker.map_tokens_per_s).full_prefill_s(num_tokens)
    floor_s = course.parts.settings.deadlines.transfer_floor_s
    return Transfer(num_tokens, min(max(native_s, floor_s), BUDGET_SHARE * by.remaining_s))
