"""`POST /v1/cascade/explain`: what would become of a request, told without running a model."""

from __future__ import annotations

from typing import Any

from gateway import asks, handoff
from gateway.cascade import Cascade
from gateway.deadline import Deadline
from gateway.handoff import Plan, Rates, Transfer
from gateway.settings import Settings
from gateway.turn import Turn
from gateway.worker import Worker
from workers.api.errors import KvrelayError

TOKENIZE_S = 2.0


async def explain(cascade: Cascade, turn: Turn, settings: Settings) -> dict[str, Any]:
    """The decision, what the registry knows, and what a handoff would do and take.

    `would_escalate` is null where an answer would have to be judged first; counts and milliseconds are null where no
    worker could say how many tokens the prompt has.
    """
    await cascade.look_up()
    decision = cascade.decision
    would_escalate = {"answer": False, "escalate": True, "cascade": None}[decision.route]
    num_tokens = await _count(cascade, turn)
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
        "prefix": {name: _prefix(turn, name) for name in (cascade.small.name, cascade.target.name)},
        "would_escalate": would_escalate,
        "would_transfer": False,
        "predicted_ms": {"full_prefill": None, "handoff": None},
    }
    return told | (_predicted(cascade, turn, settings, num_tokens) if num_tokens else {})


def _predicted(cascade: Cascade, turn: Turn, settings: Settings, num_tokens: int) -> dict[str, Any]:
    worker = next(iter(cascade.target.workers.values()))
    rates = Rates(worker.prefill_tokens_per_s, worker.map_tokens_per_s)
    predicted: dict[str, float | None] = {"full_prefill": rates.full_prefill_s(num_tokens) * 1000, "handoff": None}
    plan = _plan(cascade, turn, settings, num_tokens, rates)
    if isinstance(plan, Transfer):
        predicted["handoff"] = rates.handoff_s(num_tokens, plan.num_tokens) * 1000
    return {"predicted_ms": predicted, "would_transfer": isinstance(plan, Transfer)}


def _plan(cascade: Cascade, turn: Turn, settings: Settings, num_tokens: int, rates: Rates) -> Plan | None:
    """What an escalation would do; None where there would be none, or no handoff is allowed."""
    if cascade.decision.route == "answer" or not turn.may_map:
        return None
    own = turn.known[cascade.target.name].found
    return handoff.plan(num_tokens, own, rates, turn.deadline.remaining_s, settings.handoff, settings.deadlines)


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


async def _count(cascade: Cascade, turn: Turn) -> int | None:
    """The prompt's tokens, as a worker counts them: the gateway never guesses."""
    by = Deadline.after(TOKENIZE_S).earlier(turn.deadline)
    try:
        worker: Worker = cascade.small.pick()
        reply = await by.bound("tokenize", worker.client.tokenize(asks.tokenize(turn), timeout_s=by.remaining_s))
    except KvrelayError:
        return None
    return reply.num_tokens
