"""`confidence`: the small model's answer stands when its tokens were likely enough to itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import Field, field_validator

from gateway.policies.base import WHOLE_ANSWER, Cascading, Foresight, Token, Verdict
from gateway.policies.scores import SCORES, Score

CERTAIN = Token("", 0.0, (("", 0.0),))


class Confidence(Cascading):
    """Accepts when the `score` of the first `num_tokens` answer tokens (with `streaming: buffer`, of them all) is at
    least `threshold`, by default the score's own.

    Judging the first tokens only lets an escalation start before the small model has finished; they carry most of the
    signal, since a model that does not know begins to waver early. An escalation that is certain starts at once. From
    `speculate_after` tokens on, a score below the threshold is taken for a sign of one to come, and the handoff begins
    beside the decode (null: never on a guess). An answer that scores below `leap_below` goes straight to the last tier.
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
            raise ValueError(f"should be {at_least}less than or equal to {score.high:g}")
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

    def judge(self, tokens: Sequence[Token]) -> Verdict:
        judged = tokens[: self.num_judged_tokens]
        if not self._can_score(judged):
            return Verdict(False, "no_logprobs")
        found = self.scoring.of(judged, self.quantile)
        if found >= self._least:
            return Verdict(True, "confident", found)
        leap = self.leap_below is not None and found < self.leap_below
        return Verdict(False, "lost" if leap else "unsure", found, leap=leap)

    def foresee(self, tokens: Sequence[Token]) -> Foresight:
        judged = tokens[: self.num_judged_tokens]
        if not self._can_score(judged):
            return "open"
        if self.num_judged_tokens != WHOLE_ANSWER and self._best_score(judged) < self._least:
            return "certain"
        early = self.speculate_after is not None and len(judged) >= self.speculate_after
        return "likely" if early and self.scoring.of(judged, self.quantile) < self._least else "open"

    def _best_score(self, begun: Sequence[Token]) -> float:
        """With nothing but certain tokens to follow. An answer that ends sooner scores no better."""
        rest = [CERTAIN] * (self.num_judged_tokens - len(begun))
        return self.scoring.of([*begun, *rest], self.quantile)

    def _can_score(self, tokens: Sequence[Token]) -> bool:
        return bool(tokens) and (not self.num_top_logprobs or all(token.top for token in tokens))

    @property
    def _least(self) -> float:
        return self.scoring.threshold if self.threshold is None else self.threshold
