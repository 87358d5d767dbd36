"""The decision before any model runs: which policy, over which tiers."""

from __future__ import annotations

from collections.abc import Sequence

from gateway import policies
from gateway.errors import PermissionDenied
from gateway.policies import Asked, Decision, Policy, Selected
from gateway.policies.budget import Budget
from gateway.schemas import KvrelayOptions
from gateway.settings import AUTO
from gateway.state.tenants import Tenant
from gateway.turn import Named, Turn
from gateway.upstream.fleet import Fleet, Tier
from workers.api.errors import InvalidRequest
from workers.api.schemas import ResponseFormat

NAMED = "named"  # stands as the policy where the client named the model


def choose_policy(options: KvrelayOptions, configured: Policy) -> Policy:
    """The configured policy, or the one that the request names, with its defaults. Raises `InvalidRequest`."""
    if options.policy is None or options.policy == configured.name:
        return configured
    try:
        return policies.build({"name": options.policy})
    except ValueError as error:
        raise InvalidRequest(f"kvrelay.policy: {error}", param="kvrelay.policy") from error


def asked(turn: Turn, overspent: frozenset[Budget]) -> Asked:
    """What policies may know of the request."""
    users = [message for message in turn.messages if message.role == "user"]
    return Asked(
        text=users[-1].text if users else "",
        num_chars=sum(len(message.text) for message in turn.messages),
        has_tools=bool(turn.request.offered_tools),
        is_streamed=turn.request.stream,
        tenant_tier=turn.tenant.tier,
        overspent=overspent,
    )


def decide(turn: Turn, asked: Asked, selected: Selected, fleet: Fleet, tiers: Sequence[str]) -> Decision:
    """`auto` leaves it to the policy; a model by name answers itself. Raises `ModelNotFound`, `InvalidRequest`,
    `PermissionDenied`."""
    options, named = turn.request.kvrelay, fleet.named(turn.request.model, turn.tenant.tiers)
    if named is None:
        return selected.decide(tiers, asked)
    check_may_use(turn.tenant, named)
    if turn.request.form is not None and not named.may_answer_in(turn.request.form.type):
        raise _no_such_form(turn.request.form, [named])
    if named.name not in tiers:
        raise InvalidRequest(
            f"model {named.name!r} lies above max_tier {options.max_tier!r}; allowed: {', '.join(tiers)}",
            param="kvrelay.max_tier",
        )
    if options.policy is not None:
        raise InvalidRequest(
            f"kvrelay.policy: a policy chooses among models; leave it out, or ask for 'auto' instead of {named.name!r}",
            param="kvrelay.policy",
        )
    return Decision("answer", named.name, NAMED, NAMED, forced=True)


def by_cache(named: Named, decision: Decision, fleet: Fleet, tiers: Sequence[str]) -> Decision:
    """The model that holds the cache answers; where it is lost, the one that would have had the last word. Raises
    `InvalidRequest` for a cache of another model than the request asks for, or allows."""
    worker = fleet.worker(named.found.entry.worker) if named.found else None
    holder = worker.tier if worker else decision.tier
    if holder not in tiers or (decision.policy == NAMED and holder != decision.tier):
        raise InvalidRequest(f"kv_transfer_params.cache_id: its model is {holder!r}; ask for that", param="model")
    return Decision("answer", holder, NAMED, "cache", forced=True)


def check_may_use(tenant: Tenant, tier: Tier) -> None:
    """Raises `PermissionDenied`."""
    if tier.name not in tenant.tiers:
        raise PermissionDenied(f"model {tier.name!r} is not for this key; allowed: {', '.join(tenant.tiers)}")


def allowed(turn: Turn, fleet: Fleet) -> list[str]:
    """The tiers that this request may use, small to large; never empty. Raises `InvalidRequest`."""
    options = turn.request.kvrelay
    tiers = [tier for tier in _up_to(options, fleet, turn.tenant) if tier in turn.tenant.tiers]
    if not tiers:
        raise InvalidRequest(
            f"kvrelay.max_tier: {options.max_tier!r} leaves no model that this key may use; "
            f"allowed: {', '.join(turn.tenant.tiers)}",
            param="kvrelay.max_tier",
        )
    form = turn.request.form
    return tiers if form is None or turn.request.model != AUTO else _able(form, [fleet.tiers[tier] for tier in tiers])


def _able(form: ResponseFormat, tiers: Sequence[Tier]) -> list[str]:
    """Those of the tiers that can answer in this form."""
    able = [tier.name for tier in tiers if tier.may_answer_in(form.type)]
    if not able:
        raise _no_such_form(form, tiers)
    return able


def _no_such_form(form: ResponseFormat, tiers: Sequence[Tier]) -> InvalidRequest:
    models = " nor ".join(repr(tier.model) for tier in tiers)
    allowed = ", ".join(dict.fromkeys(one for tier in tiers for one in tier.response_formats))
    return InvalidRequest(
        f"response_format.type: {form.type!r} is nothing that {models} can be asked for; allowed: {allowed}",
        param="response_format.type",
    )


def _up_to(options: KvrelayOptions, fleet: Fleet, tenant: Tenant) -> list[str]:
    if options.max_tier is None:
        return fleet.names
    if options.max_tier not in fleet.names:
        raise InvalidRequest(
            f"kvrelay.max_tier: unknown tier {options.max_tier!r}; known: {', '.join(tenant.tiers)}",
            param="kvrelay.max_tier",
        )
    return fleet.names[: fleet.names.index(options.max_tier) + 1]
