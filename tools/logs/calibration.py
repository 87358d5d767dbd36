"""Find a policy's threshold from answers with known confidence and quality.

Agreement with the large model is fitted as a function of confidence by isotonic regression (pool adjacent violators):
more confidence never predicts less agreement. One half of the log is used for the fit, the other to evaluate it.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tools.logs import LogUnusable, read_objects

MIN_ANSWERS = 20


@dataclass(frozen=True)
class LabelledAnswer:
    """An answer of the small model: its confidence, and whether it was as good as the large model's."""

    confidence: float
    agrees: bool


@dataclass(frozen=True)
class Isotonic:
    """A non-decreasing step function: `values[i]` from `starts[i]` on; below the first start, the first value."""

    starts: tuple[float, ...]
    values: tuple[float, ...]

    @classmethod
    def fit(cls, answers: Sequence[LabelledAnswer]) -> Isotonic:
        """Return the least squares fit among all non-decreasing functions."""
        by_confidence: dict[float, list[bool]] = {}
        for answer in answers:
            by_confidence.setdefault(answer.confidence, []).append(answer.agrees)
        pools: list[list[float]] = []  # [start, sum, count]
        for confidence in sorted(by_confidence):
            agreements = by_confidence[confidence]
            pools.append([confidence, float(sum(agreements)), float(len(agreements))])
            while len(pools) > 1 and pools[-2][1] / pools[-2][2] >= pools[-1][1] / pools[-1][2]:
                _, total, num = pools.pop()
                pools[-1][1] += total
                pools[-1][2] += num
        return cls(tuple(pool[0] for pool in pools), tuple(pool[1] / pool[2] for pool in pools))

    def __call__(self, confidence: float) -> float:
        return self.values[max(0, bisect_right(self.starts, confidence) - 1)]


@dataclass(frozen=True)
class ThresholdEffect:
    """The effect of a threshold on a set of answers. An escalated answer agrees with the large model by definition."""

    escalations: float
    agreement: float
    agreement_of_accepted: float | None

    @classmethod
    def of(cls, answers: Sequence[LabelledAnswer], threshold: float) -> ThresholdEffect:
        accepted = [answer.agrees for answer in answers if answer.confidence >= threshold]
        escalated = len(answers) - len(accepted)
        return cls(
            escalations=escalated / len(answers),
            agreement=(escalated + sum(accepted)) / len(answers),
            agreement_of_accepted=sum(accepted) / len(accepted) if accepted else None,
        )

    def relative_cost(self, small_cost: float) -> float:
        """Return the cost per request, where the large model alone costs 1 and the small one `small_cost`."""
        return small_cost + self.escalations


@dataclass(frozen=True)
class Goal:
    """A maximum `share` of escalations, or a minimum share of agreement."""

    of: Literal["escalations", "agreement"]
    share: float

    def threshold(self, answers: Sequence[LabelledAnswer]) -> float:
        find = threshold_for_escalations if self.of == "escalations" else threshold_for_agreement
        return find(answers, self.share)

    def is_met(self, effect: ThresholdEffect) -> bool:
        if self.of == "escalations":
            return effect.escalations <= self.share
        return effect.agreement >= self.share


def read_answers(path: Path) -> list[LabelledAnswer]:
    """Read lines `{"confidence": number, "agrees": true | false}`; a reply's `kvrelay.confidence` also counts. Raises
    `LogUnusable`."""
    answers = []
    for place, line in read_objects(path):
        kvrelay = line.get("kvrelay")
        confidence = line.get("confidence", kvrelay.get("confidence") if isinstance(kvrelay, dict) else None)
        agrees = line.get("agrees")
        if not isinstance(confidence, (int, float)) or isinstance(confidence, bool) or not isinstance(agrees, bool):
            raise LogUnusable(f'{place} needs "confidence": a number and "agrees": true or false')
        answers.append(LabelledAnswer(float(confidence), agrees))
    if len(answers) < MIN_ANSWERS:
        raise LogUnusable(f"{path} holds {len(answers)} answers; at least {MIN_ANSWERS} are needed")
    return answers


def halves(answers: Sequence[LabelledAnswer]) -> tuple[list[LabelledAnswer], list[LabelledAnswer]]:
    """Split the answers into one half to fit and one held out, by a hash of their place: always the same split."""
    is_fit = [hashlib.sha256(str(place).encode()).digest()[0] % 2 == 0 for place in range(len(answers))]
    fit = [answer for answer, here in zip(answers, is_fit, strict=True) if here]
    return fit, [answer for answer, here in zip(answers, is_fit, strict=True) if not here]


def threshold_for_escalations(answers: Sequence[LabelledAnswer], maximum: float) -> float:
    """Return the highest threshold that escalates at most this share of the answers."""
    thresholds = _thresholds(answers)
    first_over_maximum = bisect_left(
        thresholds, True, key=lambda threshold: ThresholdEffect.of(answers, threshold).escalations > maximum
    )
    return thresholds[first_over_maximum - 1]


def threshold_for_agreement(answers: Sequence[LabelledAnswer], minimum: float) -> float:
    """Return the lowest threshold with at least this expected agreement; infinity if no confidence in the log gives
    it, since escalating everything always does."""
    expected = Isotonic.fit(answers)

    def is_enough(threshold: float) -> bool:
        agreeing = (expected(one.confidence) if one.confidence >= threshold else 1.0 for one in answers)
        return math.fsum(agreeing) / len(answers) >= minimum

    thresholds = _thresholds(answers)
    found = bisect_left(thresholds, True, key=is_enough)
    return thresholds[found] if found < len(thresholds) else math.inf


def _thresholds(answers: Sequence[LabelledAnswer]) -> list[float]:
    """Return the distinct confidences, lowest first. Escalations and agreement never fall as the threshold rises."""
    return sorted({answer.confidence for answer in answers})


def plot(function: Isotonic, threshold: float) -> str:
    """Draw agreement (0 to 1) over confidence as SVG, with a dashed line at a finite threshold."""
    marks = [threshold] if math.isfinite(threshold) else []
    left, right = min([function.starts[0], *marks]), max(0.0, function.starts[-1], *marks)
    span = (right - left) or 1.0

    def line(style: str, *points: tuple[float, float]) -> str:
        drawn = " ".join(f"{600 * (x - left) / span:.1f},{300 - 300 * y:.1f}" for x, y in points)
        return f'<polyline points="{drawn}" fill="none" {style}/>'

    ends = zip(function.starts, [*function.starts[1:], right], function.values, strict=True)
    steps = [(x, value) for start, end, value in ends for x in (start, end)]
    marked = "".join(f"; threshold {mark:.3f}" for mark in marks)
    return "\n".join(
        (
            '<svg xmlns="http://www.w3.org/2000/svg" viewBox="-20 -40 640 380" font-family="sans-serif">',
            line('stroke="black"', (left, 1), (left, 0), (right, 0)),
            line('stroke="steelblue" stroke-width="2"', *steps),
            *(line('stroke="firebrick" stroke-dasharray="4"', (mark, 0), (mark, 1)) for mark in marks),
            '<text y="-16">agreement with the large model, 0 to 1</text>',
            f'<text y="324">confidence, {left:.2f} to {right:.2f}{marked}</text>',
            "</svg>\n",
        )
    )
