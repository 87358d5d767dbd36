"""Whether a mapper that serves is as good as its gate asks: decided from what was compared last."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from mappers.manifest import QualityGate
from workers.api.schemas import ShadowInfo

RETURN_MARGIN = 0.2  # of what a gate allows


@dataclass(frozen=True)
class Comparison:
    """Of one answer's tokens over a mapped and over a native cache: how many, on how many both expect the same next
    one, and their KL divergences (native to mapped, nats) summed. `digest` names the text, prompt and all."""

    num_tokens: int
    num_agreed: int
    kl_sum: float
    digest: str = ""

    @property
    def kl_mean(self) -> float:
        return self.kl_sum / self.num_tokens


def stricter(gate: QualityGate) -> QualityGate:
    """What a bundle that was switched off must reach to be used again: less than what its gate allows, so that one on
    the edge does not go on and off."""
    allowed = 1 - RETURN_MARGIN
    return gate.model_copy(
        update={
            "max_ppl_ratio": 1 + allowed * (gate.max_ppl_ratio - 1),
            "min_top1": 1 - allowed * (1 - gate.min_top1),
        }
    )


class Window:
    """The last `num_answers` comparisons of one bundle, against a gate; with `each_text_once`, the last of each."""

    def __init__(self, gate: QualityGate, num_answers: int, *, each_text_once: bool = False):
        self._gate = gate
        self._size = num_answers
        self._each_text_once = each_text_once
        self._last: deque[Comparison] = deque(maxlen=num_answers)

    @property
    def is_full(self) -> bool:
        return len(self._last) == self._size

    def emptied(self) -> Window:
        """For what is compared from now on."""
        return Window(self._gate, self._size)

    def for_trials(self) -> Window:
        """For what is compared while the bundle is off. What is served counts as often as it is; nobody is served then,
        and one prompt that is asked again and again says no more than once."""
        return Window(stricter(self._gate), self._size, each_text_once=True)

    def add(self, comparison: Comparison) -> None:
        if self._each_text_once:
            self._last = deque((one for one in self._last if one.digest != comparison.digest), self._size)
        self._last.append(comparison)

    @property
    def info(self) -> ShadowInfo | None:
        """None until something was compared. To a text drawn from the native distributions, the mapped cache has a
        perplexity so many times higher: e to the mean KL divergence."""
        if not self._last:
            return None
        num_tokens = sum(one.num_tokens for one in self._last)
        return ShadowInfo(
            num_answers=len(self._last),
            top1=sum(one.num_agreed for one in self._last) / num_tokens,
            ppl_ratio=math.exp(sum(one.kl_sum for one in self._last) / num_tokens),
        )

    @property
    def objection(self) -> str | None:
        """What speaks against the bundle; nothing does until the window is full."""
        info = self.info
        if info is None or not self.is_full:
            return None
        over = f"over the last {info.num_answers} answers compared in service"
        if info.top1 < self._gate.min_top1:
            return f"top-1 agreement {info.top1:.3f} {over} is below the gate's {self._gate.min_top1:.3g}"
        if info.ppl_ratio > self._gate.max_ppl_ratio:
            return f"perplexity ratio {info.ppl_ratio:.3f} {over} is above the gate's {self._gate.max_ppl_ratio:.3g}"
        return None
