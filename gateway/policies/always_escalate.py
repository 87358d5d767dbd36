"""`always_escalate`: the largest tier answers everything, from what the first has read. For demo, bench and tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from gateway.policies.base import Asked, Decision, Policy


class AlwaysEscalate(Policy):
    name: ClassVar[str] = "always_escalate"

    def decide(self, tiers: Sequence[str], asked: Asked) -> Decision:
        if len(tiers) == 1:
            return Decision("answer", tiers[0], self.name, "single_tier", forced=True)
        return Decision("escalate", tiers[-1], self.name, "forced", forced=True)
