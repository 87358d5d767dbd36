"""`verifier`: the small model is asked whether its own answer is right (arXiv 2207.05221).

system, user, ...          the conversation
assistant                  its answer, whole
user                       "Is this answer correct ...? Reply with Yes or No."
assistant                  Yes or No: the share of Yes is the confidence
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

from pydantic import Field

from gateway.policies.base import WHOLE_ANSWER, CascadePolicy, TokenLogprob, Verdict

NUM_TOP = 10  # likeliest tokens to search for Yes and No


class Verifier(CascadePolicy):
    """Accepts an answer if P(Yes) / (P(Yes) + P(No)) of the reply to `question` is at least `threshold`.

    It costs one token more, and no second prefill, as the answer's cache is reused. Nothing is sent before the verdict.
    """

    name: ClassVar[str] = "verifier"
    threshold: float = Field(default=0.5, ge=0, le=1)
    question: str = Field(default="Is your answer correct and complete? Reply with Yes or No.", min_length=1)

    @property
    def num_judged_tokens(self) -> int:
        return WHOLE_ANSWER

    @property
    def follow_up(self) -> str | None:
        return self.question

    @property
    def num_top_logprobs(self) -> int:
        return NUM_TOP

    def judge(self, tokens: Sequence[TokenLogprob]) -> Verdict:
        yes, no = (_probability(tokens, word) for word in ("yes", "no"))
        if yes + no == 0:
            return Verdict(False, "no_verdict")
        share = yes / (yes + no)
        return Verdict(True, "verified", share) if share >= self.threshold else Verdict(False, "doubted", share)


def _probability(tokens: Sequence[TokenLogprob], word: str) -> float:
    """The probability that the reply begins with this word, in any case and with any spaces."""
    if not tokens:
        return 0.0
    first = tokens[0]
    logprobs = dict(first.top) | {first.text: first.logprob}
    return sum(math.exp(logprob) for text, logprob in logprobs.items() if text.strip().lower() == word)
