"""From answers whose confidence and worth are known to the threshold of a policy.

    agreement with the large model, as a function of confidence: isotonic regression (pool adjacent violators),
    since a surer answer is never taken for a worse one; on half of the log. The other half says what it is worth.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tools.logs.lines import LogUnusable, objects

MIN_ANSWERS = 20


@dataclass(frozen=True)
class Judged:
    """An answer of the small model: how sure it was, and whether it was as good as the large one's."""

    confidence: float
    agrees: bool


@dataclass(frozen=True)
class Isotonic:
    """A step function that never falls: `values[i]` from `starts[i]` on; below the first start, the first value."""

    starts: tuple[float, ...]
    values: tuple[float, ...]

    @classmethod
    def fit(cls, answers: Sequence[Judged]) -> Isotonic:
        """Least squares among all functions that never fall."""
        pools: list[list[float]] = []  # [start, sum, count]
        for confidence, agreed, count in _by_confidence(answers):
            pools.append([confidence, agreed, count])
            while len(pools) > 1 and pools[-2][1] / pools[-2][2] >= pools[-1][1] / pools[-1][2]:
                _, total, num = pools.pop()
                pools[-1][1] += total
                pools[-1][2] += num
        return cls(tuple(pool[0] for pool in pools), tuple(pool[1] / pool[2] for pool in pools))

    def __call__(self, confidence: float) -> float:
        return self.values[max(0, bisect_right(self.starts, confidence) - 1)]


@dataclass(frozen=True)
class Outcome:
    """What a threshold does to a set of answers. An escalated one agrees with the large model by definition."""

    escalations: float
    agreement: float
    agreement_of_accepted: float | None

    @classmethod
    def of(cls, answers: Sequence[Judged], threshold: float) -> Outcome:
        accepted = [answer.agrees for answer in answers if answer.confidence >= threshold]
        escalated = len(answers) - len(accepted)
        return cls(
            escalations=escalated / len(answers),
            agreement=(escalated + sum(accepted)) / len(answers),
            agreement_of_accepted=sum(accepted) / len(accepted) if accepted else None,
        )

    def relative_cost(self, small_cost: float) -> float:
        """Of a request, where the large model alone costs 1 and the small one `small_cost`."""
        return small_cost + self.escalations


@dataclass(frozen=True)
class Goal:
    """At most such a `share` of escalations, or at least such a share of agreement."""

    of: Literal["escalations", "agreement"]
    share: float

    def threshold(self, answers: Sequence[Judged]) -> float:
        find = threshold_for_escalations if self.of == "escalations" else threshold_for_agreement
        return find(answers, self.share)

    def reached(self, outcome: Outcome) -> float:
        return outcome.escalations if self.of == "escalations" else outcome.agreement

    def is_met(self, outcome: Outcome) -> bool:
        reached = self.reached(outcome)
        return reached <= self.share if self.of == "escalations" else reached >= self.share


def read_answers(path: Path) -> list[Judged]:
    """Lines `{"confidence": number, "agrees": true | false}`; a reply's `kvrelay.confidence` will do. Raises
    `LogUnusable`."""
    answers = [_judged(place, line) for place, line in objects(path)]
    if len(answers) < MIN_ANSWERS:
        raise LogUnusable(f"{path} holds {len(answers)} answers; at least {MIN_ANSWERS} are needed")
    return answers


def halves(answers: Sequence[Judged]) -> tuple[list[Judged], list[Judged]]:
    """One to fit, one held out: by a hash of the answer's place, so that a log is always split alike."""
    is_fit = [hashlib.sha256(str(place).encode()).digest()[0] % 2 == 0 for place in range(len(answers))]
    fit = [answer for answer, here in zip(answers, is_fit, strict=True) if here]
    return fit, [answer for answer, here in zip(answers, is_fit, strict=True) if not here]


def threshold_for_escalations(answers: Sequence[Judged], at_most: float) -> float:
    """The highest threshold that escalates no larger a share of these answers."""
    seen = _seen(answers)
    first_that_escalates_more = bisect_left(
        seen, True, key=lambda threshold: Outcome.of(answers, threshold).escalations > at_most
    )
    return seen[first_that_escalates_more - 1]


def threshold_for_agreement(answers: Sequence[Judged], at_least: float) -> float:
    """The lowest threshold at which these answers are expected to agree with the large model so often. Where none of
    their confidences is one, infinity: escalating all always does."""
    expected = Isotonic.fit(answers)

    def is_enough(threshold: float) -> bool:
        agreeing = (expected(one.confidence) if one.confidence >= threshold else 1.0 for one in answers)
        return math.fsum(agreeing) / len(answers) >= at_least

    seen = _seen(answers)
    found = bisect_left(seen, True, key=is_enough)
    return seen[found] if found < len(seen) else math.inf


def _seen(answers: Sequence[Judged]) -> list[float]:
    """The confidences, each once, the lowest first: with the threshold, escalations and agreement never fall."""
    return sorted({answer.confidence for answer in answers})


def _by_confidence(answers: Sequence[Judged]) -> list[tuple[float, float, float]]:
    """`(confidence, how many agree, how many)`, in order."""
    found: dict[float, list[bool]] = {}
    for answer in answers:
        found.setdefault(answer.confidence, []).append(answer.agrees)
    return [(confidence, float(sum(found[confidence])), float(len(found[confidence]))) for confidence in sorted(found)]


def _judged(place: str, line: dict[str, Any]) -> Judged:
    told = line.get("kvrelay")
    confidence = line.get("confidence", told.get("confidence") if isinstance(told, dict) else None)
    agrees = line.get("agrees")
    if not isinstance(confidence, (int, float)) or isinstance(confidence, bool) or not isinstance(agrees, bool):
        raise LogUnusable(f'{place} needs "confidence": a number and "agrees": true or false')
    return Judged(float(confidence), agrees)
