"""`POST /v1/cascade/explain`: what would become of a request, told without running a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gateway import asks, handoff
from gateway.course import Course
from gateway.handoff import Plan, Prefill, Rates, Transfer, UseOwn, has_bundle
from gateway.turn import Turn
from gateway.upstream.deadline import Deadline
from gateway.upstream.fleet import Tier
from gateway.upstream.worker import Worker
from workers.api.errors import KvrelayError

TOKENIZE_S = 2.0


async def explain(course: Course) -> dict[str, Any]:
    """The decision, what the registry knows, and what an escalation would do and take.

    `would_escalate` is null where an answer would have to be judged first. `escalation` says what the target would
    answer from (`own_exact`, `own_mapped`, `handoff`, `full_prefill`) and why; null where there is none to come.
    Counts and milliseconds are null where no worker could say how many tokens the prompt has.
    """
    turn, decision = course.turn, course.decision
    with course.parts.shares.one(turn.tenant.name):
        await course.look_up()
        with turn.upstream(turn.phase):
            num_tokens = await _count(course)
    would_escalate = {"answer": False, "escalate": True, "cascade": None}[decision.route]
    told: dict[str, Any] = {
        "route": decision.route,
        "tier": decision.tier,
        "policy": decision.policy,
        "reason": decision.reason,
        "rule": decision.rule,
        "forced": decision.forced,
        "num_messages": len(turn.messages),
        "stable_messages": turn.num_stable,
        "num_tokens": num_tokens,
        "prefix": {name: _prefix(turn, name) for name in (course.small.name, *(tier.name for tier in course.above))},
        "would_escalate": would_escalate,
        "would_transfer": False,
        "escalation": None,
        "predicted_ms": {"small_prefill": None, "full_prefill": None, "handoff": None},
    }
    return told | (_predicted(course, num_tokens) if num_tokens else {})


def _predicted(course: Course, num_tokens: int) -> dict[str, Any]:
    small, target = _reader(course.small), _taker(course.target)
    rates = Rates(target.prefill_tokens_per_s, target.map_tokens_per_s)
    plan = _plan(course, num_tokens, rates)
    predicted = {
        "small_prefill": _unread(course, num_tokens) / small.prefill_tokens_per_s * 1000,
        "full_prefill": rates.full_prefill_s(num_tokens) * 1000,
        "handoff": rates.handoff_s(num_tokens, plan.num_tokens) * 1000 if isinstance(plan, Transfer) else None,
    }
    return {
        "predicted_ms": predicted,
        "would_transfer": isinstance(plan, Transfer),
        "escalation": _told(plan) if plan else None,
    }


def _unread(course: Course, num_tokens: int) -> int:
    """What the small model would have to read; nothing where it is not asked."""
    if course.decision.route == "answer" and course.target is not course.small:
        return 0
    known = course.turn.known.get(course.small.name)
    best = known.best(exact_only=True) if known else None
    return max(0, num_tokens - (best.entry.num_tokens if best else 0))


def _plan(course: Course, num_tokens: int, rates: Rates) -> Plan | None:
    """What an escalation would do; None where there would be none."""
    if course.decision.route == "answer":
        return None
    turn, settings = course.turn, course.parts.settings
    if not turn.may_map:
        return Prefill("exact" if turn.stores else "no_cache", failed=False)
    own = turn.known[course.target.name].found
    plan = handoff.plan(num_tokens, own, rates, turn.deadline.remaining_s, settings.handoff, settings.deadlines)
    if isinstance(plan, Transfer) and has_bundle(_reader(course.small).info, _taker(course.target).info) is False:
        return Prefill("no_bundle", failed=True)
    return plan


def _told(plan: Plan) -> dict[str, str]:
    match plan:
        case UseOwn(found):
            return {"from": "own_exact" if found.entry.is_exact else "own_mapped", "reason": "held_by_target"}
        case Prefill(reason, _):
            return {"from": "full_prefill", "reason": reason}
        case _:
            return {"from": "handoff", "reason": "faster"}


def _reader(tier: Tier) -> Worker:
    """The worker that would be asked to read."""
    return _likely(tier, tier.pick)


def _taker(tier: Tier) -> Worker:
    """The worker that would be handed a cache."""
    return _likely(tier, tier.pick_to_take_over)


def _likely(tier: Tier, pick: Callable[[], Worker]) -> Worker:
    """The worker that would be picked, or would if any were usable."""
    try:
        return pick()
    except KvrelayError:
        if not tier.workers:
            raise
        return next(iter(tier.workers.values()))


def _prefix(turn: Turn, tier: str) -> dict[str, Any] | None:
    known = turn.known.get(tier)
    best = known.best() if known else None
    if best is None:
        return None
    return {
        "num_messages": best.num_messages,
        "num_tokens": best.entry.num_tokens,
        "provenance": best.entry.provenance,
        "worker": best.entry.worker,
    }


async def _count(course: Course) -> int | None:
    """The prompt's tokens, as a worker counts them: the gateway never guesses."""
    by = Deadline.after(TOKENIZE_S).earlier(course.turn.deadline)
    try:
        client = course.small.pick().client
        reply = await by.bound("tokenize", client.tokenize(asks.tokenize(course.turn), timeout_s=by.remaining_s))
    except KvrelayError:
        return None
    return reply.num_tokens
