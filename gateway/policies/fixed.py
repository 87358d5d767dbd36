"""`fixed`: always the same tier. The dull one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from gateway.policies.base import Asked, Decision, Policy


class Fixed(Policy):
    """`tier` answers everything; by default the first. Where a request's `max_tier` lies below, that one does."""

    name: ClassVar[str] = "fixed"
    tier: str | None = None

    def decide(self, tiers: Sequence[str], asked: Asked) -> Decision:
        wanted = self.tier or tiers[0]
        tier = wanted if wanted in tiers else tiers[-1]
        return Decision("answer", tier, self.name, "fixed" if tier == wanted else "max_tier", forced=True)

    def check(self, tiers: Sequence[str]) -> None:
        if self.tier is not None and self.tier not in tiers:
            raise ValueError(f"policy.tier: unknown tier {self.tier!r}; known: {', '.join(tiers)}")
