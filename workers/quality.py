"""Whether a mapper that serves is as good as its gate asks: decided from what was compared last."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from mappers.manifest import Gate
from workers.api.schemas import ShadowInfo


@dataclass(frozen=True)
class Comparison:
    """Of one answer's tokens over a mapped and over a native cache: how many, on how many both expect the same next
    one, and their KL divergences (native to mapped, nats) summed."""

    num_tokens: int
    num_agreed: int
    kl_sum: float

    @property
    def kl_mean(self) -> float:
        return self.kl_sum / self.num_tokens


class Window:
    """The last `num_answers` comparisons of one bundle, against its gate."""

    def __init__(self, gate: Gate, num_answers: int):
        self._gate = gate
        self._last: deque[Comparison] = deque(maxlen=num_answers)

    def add(self, comparison: Comparison) -> None:
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
        if info is None or info.num_answers < (self._last.maxlen or 0):
            return None
        over = f"over the last {info.num_answers} answers compared in service"
        if info.top1 < self._gate.min_top1:
            return f"top-1 agreement {info.top1:.3f} {over} is below the gate's {self._gate.min_top1}"
        if info.ppl_ratio > self._gate.max_ppl_ratio:
            return f"perplexity ratio {info.ppl_ratio:.3f} {over} is above the gate's {self._gate.max_ppl_ratio}"
        return None
