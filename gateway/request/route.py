"""The route of a request, chosen before any model runs: which policy, over which tiers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gateway import policies
from gateway.errors import PermissionDenied
from gateway.metrics import Metrics
from gateway.policies import Policy, RequestFeatures, RoutingDecision
from gateway.request.lookup import ClientCaches, Prefixes
from gateway.request.turn import Route, Turn
from gateway.settings import AUTO, Settings
from gateway.state.quotas import Quotas
from gateway.state.tenants import Tenant
from gateway.state.usage import Usage
from gateway.upstream.fleet import Fleet
from gateway.upstream.limits import TenantShares
from gateway.upstream.tier import Tier
from workers.api import tracing
from workers.api.errors import InvalidRequest

NAMED = "named"  # reported as the policy if the client named the model


@dataclass(frozen=True)
class Parts:
    """What all requests share."""

    settings: Settings
    fleet: Fleet
    prefixes: Prefixes
    caches: ClientCaches
    policy: Policy
    metrics: Metrics
    shares: TenantShares
    quotas: Quotas
    usage: Usage

    async def charge(
        self, tenant: Tenant, num_read: int, num_written: int = 0, *, by_tier: Mapping[str, int] = {}
    ) -> None:
        """Charge the tenant for a request's tokens, however it ended; `by_tier` counts each tier's share."""
        self.usage.add(tenant.name, num_read, num_written)
        await self.quotas.charge(tenant, num_read + num_written, by_tier=by_tier, budgets=self.policy.budgets)


async def choose(parts: Parts, turn: Turn) -> Route:
    """`auto` leaves the choice to the policy; a model by name answers itself; a cache that the client named is answered
    from by its own model. Raises `InvalidRequest`, `ModelNotFound` or `PermissionDenied`."""
    request, options, fleet = turn.request, turn.request.kvrelay, parts.fleet
    with tracing.span("route"):
        # 1. The tiers that this request may use, small to large
        tiers = allowed_tiers(turn, fleet)

        # 2. The policy: the configured one, or the one that the request names, with its defaults
        policy = parts.policy
        if options.policy is not None and options.policy != policy.name:
            try:
                policy = policies.build({"name": options.policy})
            except ValueError as error:
                raise InvalidRequest(f"kvrelay.policy: {error}", param="kvrelay.policy") from error
        users = [message for message in turn.messages if message.role == "user"]
        asked = RequestFeatures(
            text=users[-1].text if users else "",
            num_chars=sum(len(message.text) for message in turn.messages),
            has_tools=bool(request.offered_tools),
            is_streamed=request.stream,
            tenant_tier=turn.tenant.tier,
            overspent=await parts.quotas.overspent(turn.tenant, policy.budgets),
        )
        selected = policy.select(asked)

        # 3. The decision
        named = fleet.find(request.model, turn.tenant.tiers)
        decision = selected.decide(tiers, asked) if named is None else _decide_named(turn, named, tiers)
        if request.kv_transfer_params is not None:
            decision = _decide_by_cache(turn, decision, fleet, tiers)
        small, *above = (fleet.tiers[name] for name in (tiers[0], *decision.between, decision.tier))
        return Route(selected.policy, decision, small, tuple(above))


def _decide_named(turn: Turn, named: Tier, tiers: Sequence[str]) -> RoutingDecision:
    request, options = turn.request, turn.request.kvrelay
    check_may_use(turn.tenant, named)
    if request.form is not None and not named.supports_format(request.form.type):
        raise _unsupported_format(request.form.type, [named])
    if named.name not in tiers:
        raise InvalidRequest(
            f"model {named.name!r} is above max_tier {options.max_tier!r}; allowed: {', '.join(tiers)}",
            param="kvrelay.max_tier",
        )
    if options.policy is not None:
        raise InvalidRequest(
            f"kvrelay.policy: a policy chooses among models; leave it out, or ask for 'auto' instead of {named.name!r}",
            param="kvrelay.policy",
        )
    return RoutingDecision("answer", named.name, NAMED, NAMED, forced=True)


def _decide_by_cache(turn: Turn, decision: RoutingDecision, fleet: Fleet, tiers: Sequence[str]) -> RoutingDecision:
    """The model that holds the cache answers. If the cache is lost, the last tier of the decision does."""
    worker = fleet.worker(turn.client_cache.entry.worker) if turn.client_cache else None
    holder = worker.tier if worker else decision.tier
    if holder not in tiers or (decision.policy == NAMED and holder != decision.tier):
        raise InvalidRequest(f"kv_transfer_params.cache_id: its model is {holder!r}; ask for that", param="model")
    return RoutingDecision("answer", holder, NAMED, "cache", forced=True)


def allowed_tiers(turn: Turn, fleet: Fleet) -> list[str]:
    """The tiers that this request may use, small to large; never empty. Raises `InvalidRequest`."""
    options, tenant, form = turn.request.kvrelay, turn.tenant, turn.request.form
    names = fleet.names
    if options.max_tier is not None:
        if options.max_tier not in names:
            raise InvalidRequest(
                f"kvrelay.max_tier: unknown tier {options.max_tier!r}; known: {', '.join(tenant.tiers)}",
                param="kvrelay.max_tier",
            )
        names = names[: names.index(options.max_tier) + 1]
    tiers = [name for name in names if name in tenant.tiers]
    if not tiers:
        raise InvalidRequest(
            f"kvrelay.max_tier: {options.max_tier!r} leaves no model that this key may use; "
            f"allowed: {', '.join(tenant.tiers)}",
            param="kvrelay.max_tier",
        )
    if form is None or turn.request.model != AUTO:
        return tiers
    able = [name for name in tiers if fleet.tiers[name].supports_format(form.type)]
    if not able:
        raise _unsupported_format(form.type, [fleet.tiers[name] for name in tiers])
    return able


def check_may_use(tenant: Tenant, tier: Tier) -> None:
    """Raises `PermissionDenied`."""
    if tier.name not in tenant.tiers:
        raise PermissionDenied(f"model {tier.name!r} is not for this key; allowed: {', '.join(tenant.tiers)}")


def _unsupported_format(form: str, tiers: Sequence[Tier]) -> InvalidRequest:
    models = " or ".join(repr(tier.model) for tier in tiers)
    supported = ", ".join(dict.fromkeys(one for tier in tiers for one in tier.response_formats))
    return InvalidRequest(
        f"response_format {form!r} is not supported by {models}; supported: {supported}",
        param="response_format.type",
    )
