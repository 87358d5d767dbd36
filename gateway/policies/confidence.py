"""`confidence`: accept the small model's answer if the model was certain enough of its tokens.

Which score separates right answers from wrong ones best depends on the model and the task; see arXiv 2404.10136 on
cascades (quantiles beat the mean where one wrong token spoils a long answer).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import Field, field_validator

from gateway.policies.base import WHOLE_ANSWER, CascadePolicy, Forecast, TokenLogprob, Verdict

CERTAIN = TokenLogprob("", 0.0, (("", 0.0),))


@dataclass(frozen=True)
class Score:
    """A measure of how certain a model was of its tokens; larger is more certain.

    `of(tokens, quantile)` lies between `low` and `high`. `threshold` is the default. `num_top` likeliest tokens are
    required per position.
    """

    of: Callable[[Sequence[TokenLogprob], float], float]
    low: float
    high: float
    threshold: float
    num_top: int = 0


def mean(tokens: Sequence[TokenLogprob], quantile: float) -> float:
    """Mean log-probability per token: 0 is certain, -0.7 a coin toss each time."""
    return sum(token.logprob for token in tokens) / len(tokens)


def quantile_of(tokens: Sequence[TokenLogprob], quantile: float) -> float:
    """The `quantile` of the log-probabilities (nearest rank)."""
    ordered = sorted(token.logprob for token in tokens)
    return ordered[max(0, math.ceil(quantile * len(ordered)) - 1)]


def margin(tokens: Sequence[TokenLogprob], quantile: float) -> float:
    """Mean difference between the probability of the chosen token and of the likeliest other one; negative if another
    was likelier."""
    return sum(_lead(token) for token in tokens) / len(tokens)


def entropy(tokens: Sequence[TokenLogprob], quantile: float) -> float:
    """Minus the mean entropy in nats. No token beyond the top ones is likelier than they are, which gives a lower bound
    of the entropy."""
    return -sum(_entropy([logprob for _, logprob in token.top]) for token in tokens) / len(tokens)


SCORES = {
    "mean": Score(mean, -math.inf, 0.0, -0.6),
    "quantile": Score(quantile_of, -math.inf, 0.0, -2.5),
    "margin": Score(margin, -1.0, 1.0, 0.3, num_top=2),
    "entropy": Score(entropy, -math.inf, 0.0, -1.0, num_top=5),
}


def _lead(token: TokenLogprob) -> float:
    others = [logprob for text, logprob in token.top if text != token.text]
    return math.exp(token.logprob) - math.exp(max(others, default=-math.inf))


def _entropy(logprobs: Sequence[float]) -> float:
    rest = max(0.0, 1.0 - sum(map(math.exp, logprobs)))
    return -sum(math.exp(logprob) * logprob for logprob in logprobs) - rest * min(logprobs)


class Confidence(CascadePolicy):
    """Accepts an answer if the `score` of its first `num_tokens` tokens (of all, with `streaming: buffer`) is at least
    `threshold`, by default the score's own.

    Judging only the first tokens lets an escalation start before the small model has finished, and they carry most of
    the signal. An escalation that is certain starts at once. From `speculate_after` tokens on, a score below the
    threshold starts the handoff during decoding (null: never speculate). An answer that scores below `leap_below` goes
    straight to the last tier.
    """

    name: ClassVar[str] = "confidence"
    score: str = "mean"
    quantile: float = Field(default=0.1, gt=0, lt=1)
    threshold: float | None = None
    leap_below: float | None = None
    num_tokens: int = Field(default=16, ge=1)
    speculate_after: int | None = Field(default=4, ge=1)

    @field_validator("score")
    @classmethod
    def _known_score(cls, score: str) -> str:
        if score not in SCORES:
            raise ValueError(f"unknown score; known: {', '.join(SCORES)}")
        return score

    @field_validator("threshold", "leap_below")
    @classmethod
    def _within_the_score(cls, bound: float | None, info: Any) -> float | None:
        score = SCORES.get(info.data.get("score", ""))
        if bound is not None and score is not None and not score.low <= bound <= score.high:
            at_least = f"greater than or equal to {score.low:g} and " if score.low > float("-inf") else ""
            raise ValueError(f"must be {at_least}less than or equal to {score.high:g}")
        return bound

    @property
    def scoring(self) -> Score:
        return SCORES[self.score]

    @property
    def num_judged_tokens(self) -> int:
        return WHOLE_ANSWER if self.streaming == "buffer" else self.num_tokens

    @property
    def num_top_logprobs(self) -> int:
        return self.scoring.num_top

    def judge(self, tokens: Sequence[TokenLogprob]) -> Verdict:
        judged = tokens[: self.num_judged_tokens]
        if not self._can_score(judged):
            return Verdict(False, "no_logprobs")
        score = self.scoring.of(judged, self.quantile)
        if score >= self._min_score:
            return Verdict(True, "confident", score)
        leap = self.leap_below is not None and score < self.leap_below
        return Verdict(False, "lost" if leap else "unsure", score, leap=leap)

    def forecast(self, tokens: Sequence[TokenLogprob]) -> Forecast:
        judged = tokens[: self.num_judged_tokens]
        if not self._can_score(judged):
            return "open"
        if self.num_judged_tokens != WHOLE_ANSWER and self._best_score(judged) < self._min_score:
            return "certain"
        early = self.speculate_after is not None and len(judged) >= self.speculate_after
        return "likely" if early and self.scoring.of(judged, self.quantile) < self._min_score else "open"

    def _best_score(self, first: Sequence[TokenLogprob]) -> float:
        """The score if only certain tokens follow. An answer that ends sooner scores no better."""
        rest = [CERTAIN] * (self.num_judged_tokens - len(first))
        return self.scoring.of([*first, *rest], self.quantile)

    def _can_score(self, tokens: Sequence[TokenLogprob]) -> bool:
        return bool(tokens) and (not self.num_top_logprobs or all(token.top for token in tokens))

    @property
    def _min_score(self) -> float:
        return self.scoring.threshold if self.threshold is None else self.threshold
