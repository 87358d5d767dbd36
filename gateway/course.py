"""Which way a request goes, decided before any model runs, over what all requests share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from gateway import routing
from gateway.client_caches import ClientCaches
from gateway.metrics import Metrics
from gateway.policies import Decision, Policy
from gateway.prefixes import Prefixes
from gateway.settings import Settings
from gateway.state.quotas import Quotas
from gateway.state.tenants import Tenant
from gateway.turn import Turn
from gateway.upstream.fleet import Fleet, Tier
from gateway.upstream.limits import Shares
from gateway.usage import Usage
from workers.api import tracing


@dataclass(frozen=True)
class Parts:
    """What all requests share."""

    settings: Settings
    fleet: Fleet
    prefixes: Prefixes
    caches: ClientCaches
    policy: Policy
    metrics: Metrics
    shares: Shares
    quotas: Quotas
    usage: Usage

    async def spent(
        self, tenant: Tenant, num_read: int, num_written: int = 0, *, by_tier: Mapping[str, int] = {}
    ) -> None:
        """What a request has cost in tokens, however it ended; and what of that each tier's answers have."""
        self.usage.add(tenant.name, num_read, num_written)
        await self.quotas.spent(tenant, num_read + num_written, by_tier=by_tier, budgets=self.policy.budgets)


@dataclass(frozen=True)
class Course:
    """One request's: `small` is the first tier that may be asked, those `above` take over in turn if that will not do,
    `target` is the one of them that is aimed at (the last, unless told otherwise), `policy` the one that judges."""

    parts: Parts
    turn: Turn
    policy: Policy
    decision: Decision
    small: Tier
    above: tuple[Tier, ...]
    target: Tier

    def aimed_at(self, target: Tier) -> Course:
        return self if target is self.target else replace(self, target=target)

    @property
    def is_judged(self) -> bool:
        """Whether the target's answer is, as there is a tier above."""
        return self.target is not self.above[-1]

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """All that may be asked, small to large."""
        alone = self.is_answered_alone or self.small is self.target
        return self.above if alone else (self.small, *self.above)

    @property
    def is_native(self) -> bool:
        """A tier that answers alone answers natively, whatever the registry says; but for a cache that was named."""
        return self.is_answered_alone and self.turn.named is None

    @property
    def is_answered_alone(self) -> bool:
        """By the target, whatever comes, and by nobody in its place."""
        return self.decision.route == "answer"

    async def look_up(self) -> None:
        """What the registry knows of this prompt, for every tier that may be asked; looked up once."""
        if self.turn.stores and not self.turn.known:
            with tracing.span("prefix"):
                await self.parts.prefixes.look_up(self.turn, self.tiers)


async def choose(parts: Parts, turn: Turn) -> Course:
    """Raises `InvalidRequest`, `ModelNotFound` or `PermissionDenied` for a request that cannot be routed."""
    with tracing.span("route"):
        return await _chosen(parts, turn)


async def _chosen(parts: Parts, turn: Turn) -> Course:
    tiers = routing.allowed(turn, parts.fleet)
    chosen = routing.choose_policy(turn.request.kvrelay, parts.policy)
    asked = routing.asked(turn, await parts.quotas.overspent(turn.tenant, chosen.budgets))
    selected = chosen.select(asked)
    decision = routing.decide(turn, asked, selected, parts.fleet, tiers)
    if turn.named is not None:
        decision = routing.by_cache(turn.named, decision, parts.fleet, tiers)
    turn.report.decided(decision)
    small, *above = (parts.fleet.tiers[name] for name in (tiers[0], *decision.between, decision.tier))
    return Course(parts, turn, selected.policy, decision, small, tuple(above), above[-1])
