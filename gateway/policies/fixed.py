"""`fixed` and `always_escalate`: policies without a score."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from gateway.policies.base import Policy, RequestFeatures, RoutingDecision


class FixedTier(Policy):
    """`tier` answers everything, by default the first. A request whose `max_tier` is smaller gets that one."""

    name: ClassVar[str] = "fixed"
    tier: str | None = None

    def decide(self, tiers: Sequence[str], request: RequestFeatures) -> RoutingDecision:
        wanted = self.tier or tiers[0]
        tier = wanted if wanted in tiers else tiers[-1]
        return RoutingDecision("answer", tier, self.name, "fixed" if tier == wanted else "max_tier", forced=True)

    def check(self, tiers: Sequence[str]) -> None:
        if self.tier is not None and self.tier not in tiers:
            raise ValueError(f"policy.tier: unknown tier {self.tier!r}; known: {', '.join(tiers)}")


class AlwaysEscalate(Policy):
    """The first tier prefills and the last one answers, every time. For demo, benchmarks and tests."""

    name: ClassVar[str] = "always_escalate"

    def decide(self, tiers: Sequence[str], request: RequestFeatures) -> RoutingDecision:
        if len(tiers) == 1:
            return RoutingDecision("answer", tiers[0], self.name, "single_tier", forced=True)
        return RoutingDecision("escalate", tiers[-1], self.name, "forced", forced=True)
