"""`POST /v1/cascade/explain`: what would happen to a request. Runs no model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gateway.request import bodies
from gateway.request.route import Parts
from gateway.request.run import look_up
from gateway.request.steps import FullPrefill, Handoff, OwnCache, Plan, TargetRates, has_bundle, plan_handoff
from gateway.request.turn import Turn
from gateway.upstream.deadline import Deadline
from gateway.upstream.tier import Tier
from gateway.upstream.worker import Worker
from workers.api.errors import KvrelayError

TOKENIZE_S = 2.0


async def explain(parts: Parts, turn: Turn) -> dict[str, Any]:
    """The decision, what the registry knows, and what an escalation would do and take.

    `would_escalate` is null if an answer has to be judged first. `escalation` says what the target would answer from
    (`own_exact`, `own_mapped`, `handoff`, `full_prefill`) and why; null if there would be none. Counts and milliseconds
    are null if no worker could count the prompt's tokens.
    """
    route, decision = turn.route, turn.route.decision

    # 1. What is known of the prompt
    with parts.shares.one(turn.tenant.name):
        if turn.stores and not turn.lookups:
            await look_up(parts, turn)
        num_tokens = await _count_tokens(turn)
    explanation: dict[str, Any] = {
        "route": decision.route,
        "tier": decision.tier,
        "policy": decision.policy,
        "reason": decision.reason,
        "rule": decision.rule,
        "forced": decision.forced,
        "num_messages": len(turn.messages),
        "stable_messages": turn.num_stable,
        "num_tokens": num_tokens,
        "prefix": {tier.name: _prefix(turn, tier) for tier in dict.fromkeys((route.small, *route.above))},
        "would_escalate": {"answer": False, "escalate": True, "cascade": None}[decision.route],
        "would_transfer": False,
        "escalation": None,
        "predicted_ms": {"small_prefill": None, "full_prefill": None, "handoff": None},
    }
    if not num_tokens:
        return explanation

    # 2. What an escalation would do
    small, target = _likely(route.small, route.small.pick), _likely(route.target, route.target.pick_for_transfer)
    rates = TargetRates(target.prefill_tokens_per_s, target.map_tokens_per_s)
    plan: Plan | None = None
    if decision.route != "answer":
        if not turn.may_map:
            plan = FullPrefill("exact" if turn.stores else "no_cache", is_failure=False)
        else:
            own, settings = turn.lookups[route.target.name].hits, turn.settings
            remaining_s = turn.deadline.remaining_s
            plan = plan_handoff(num_tokens, own, rates, remaining_s, settings.handoff, settings.deadlines)
            if isinstance(plan, Handoff) and has_bundle(small.info, target.info) is False:
                plan = FullPrefill("no_bundle", is_failure=True)
    handoff_s = rates.handoff_s(num_tokens, plan.num_tokens) if isinstance(plan, Handoff) else None

    # 3. What the small model would have to prefill; nothing if it is not asked
    num_unread = 0
    if decision.route != "answer" or route.target is route.small:
        lookup = turn.lookups.get(route.small.name)
        best = lookup.best(exact_only=True) if lookup else None
        num_unread = max(0, num_tokens - (best.entry.num_tokens if best else 0))

    return explanation | {
        "predicted_ms": {
            "small_prefill": num_unread / small.prefill_tokens_per_s * 1000,
            "full_prefill": rates.full_prefill_s(num_tokens) * 1000,
            "handoff": handoff_s * 1000 if handoff_s is not None else None,
        },
        "would_transfer": isinstance(plan, Handoff),
        "escalation": _describe(plan),
    }


def _describe(plan: Plan | None) -> dict[str, str] | None:
    match plan:
        case None:
            return None
        case OwnCache(hit):
            return {"from": "own_exact" if hit.entry.is_exact else "own_mapped", "reason": "held_by_target"}
        case FullPrefill(reason, _):
            return {"from": "full_prefill", "reason": reason}
        case Handoff():
            return {"from": "handoff", "reason": "faster"}


def _likely(tier: Tier, pick: Callable[[], Worker]) -> Worker:
    """The worker that would be picked, if any were usable."""
    try:
        return pick()
    except KvrelayError:
        if not tier.workers:
            raise
        return next(iter(tier.workers.values()))


def _prefix(turn: Turn, tier: Tier) -> dict[str, Any] | None:
    lookup = turn.lookups.get(tier.name)
    best = lookup.best() if lookup else None
    if best is None:
        return None
    return {
        "num_messages": best.num_messages,
        "num_tokens": best.entry.num_tokens,
        "provenance": best.entry.provenance,
        "worker": best.entry.worker,
    }


async def _count_tokens(turn: Turn) -> int | None:
    """The prompt's tokens, counted by a worker: the gateway never guesses."""
    deadline = Deadline.after(TOKENIZE_S).earlier(turn.deadline)
    try:
        client = turn.route.small.pick().client
        async with deadline.bound("tokenize"):
            reply = await client.tokenize(bodies.tokenize(turn), timeout_s=deadline.remaining_s)
        return reply.num_tokens
    except KvrelayError:
        return None
