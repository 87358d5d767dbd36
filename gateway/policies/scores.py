"""How sure a model was of the tokens it wrote: one number an answer, larger is surer.

Which of them tells right answers from wrong ones best differs with the model and the task; see arXiv 2404.10136 on
cascades (quantiles over tokens do better than the mean where one wrong token spoils a long answer).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gateway.policies.base import Token


@dataclass(frozen=True)
class Score:
    """`of(tokens, quantile)` lies in `low` to `high`; `threshold` is the default one. `num_top` likeliest tokens are
    needed at each place."""

    of: Callable[[Sequence[Token], float], float]
    low: float
    high: float
    threshold: float
    num_top: int = 0


def mean(tokens: Sequence[Token], quantile: float) -> float:
    """Mean log-probability a token: 0 is certain, -0.7 a coin toss each time. Length does not count."""
    return sum(token.logprob for token in tokens) / len(tokens)


def of_quantile(tokens: Sequence[Token], quantile: float) -> float:
    """The log-probability that the share `quantile` of the tokens does not exceed (nearest rank)."""
    ordered = sorted(token.logprob for token in tokens)
    return ordered[max(0, math.ceil(quantile * len(ordered)) - 1)]


def margin(tokens: Sequence[Token], quantile: float) -> float:
    """Mean lead, in probability, of the token written over the likeliest other one: below 0 where another was
    likelier."""
    return sum(_lead(token) for token in tokens) / len(tokens)


def entropy(tokens: Sequence[Token], quantile: float) -> float:
    """Minus the mean entropy in nats; of the tokens beyond the likeliest it is only known that none is likelier, so the
    entropy is at least what is counted."""
    return -sum(_entropy([logprob for _, logprob in token.top]) for token in tokens) / len(tokens)


SCORES = {
    "mean": Score(mean, -math.inf, 0.0, -0.6),
    "quantile": Score(of_quantile, -math.inf, 0.0, -2.5),
    "margin": Score(margin, -1.0, 1.0, 0.3, num_top=2),
    "entropy": Score(entropy, -math.inf, 0.0, -1.0, num_top=5),
}


def _lead(token: Token) -> float:
    others = [logprob for text, logprob in token.top if text != token.text]
    return math.exp(token.logprob) - math.exp(max(others, default=-math.inf))


def _entropy(logprobs: Sequence[float]) -> float:
    rest = max(0.0, 1.0 - sum(map(math.exp, logprobs)))
    return -sum(math.exp(logprob) * logprob for logprob in logprobs) - rest * min(logprobs)
