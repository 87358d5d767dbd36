"""`confidence`: the small model's answer stands when its first tokens were likely enough to itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from pydantic import Field

from gateway.policies.base import Decision, Policy, Verdict


class Confidence(Policy):
    """Accepts when the mean log-probability of the first `num_tokens` answer tokens is at least `threshold`.

    The mean is per token (natural log, so 0 is certain and -0.7 a coin toss each time): a long answer is not punished
    for its length. Judging the first tokens only lets an escalation start before the small model has finished; they
    carry most of the signal, since a model that does not know begins to waver early.
    """

    name: ClassVar[str] = "confidence"
    threshold: float = Field(default=-0.6, le=0)
    num_tokens: int = Field(default=16, ge=1)

    def decide(self, tiers: Sequence[str]) -> Decision:
        if len(tiers) == 1:
            return Decision("answer", tiers[0], self.name, "single_tier", forced=False)
        return Decision("cascade", tiers[-1], self.name, "judge", forced=False)

    @property
    def num_judged_tokens(self) -> int:
        return self.num_tokens

    def judge(self, logprobs: Sequence[float]) -> Verdict:
        judged = logprobs[: self.num_tokens]
        if not judged:
            return Verdict(False, "no_logprobs")
        mean = sum(judged) / len(judged)
        return Verdict(True, "confident", mean) if mean >= self.threshold else Verdict(False, "unsure", mean)
