"""`RateMeter`: tokens per second as measured lately, medians over a window."""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Literal

from workers.api.schemas import Rates

Kind = Literal["prefill", "decode", "map"]

WINDOW = 64
MIN_TOKENS: dict[str, int] = {"prefill": 32, "decode": 1, "map": 32}


class RateMeter:
    """Records how long tokens took. Samples of very few tokens say nothing about long ones and are left out."""

    def __init__(self) -> None:
        self._samples: dict[str, deque[float]] = {kind: deque(maxlen=WINDOW) for kind in MIN_TOKENS}

    def record(self, kind: Kind, num_tokens: int, seconds: float) -> None:
        if num_tokens >= MIN_TOKENS[kind] and seconds > 0:
            self._samples[kind].append(num_tokens / seconds)

    def rate(self, kind: Kind) -> float | None:
        """Median tokens per second, None until measured."""
        samples = list(self._samples[kind])
        return median(samples) if samples else None

    def snapshot(self) -> Rates:
        return Rates(
            prefill_tokens_per_s=self.rate("prefill"),
            decode_tokens_per_s=self.rate("decode"),
            map_tokens_per_s=self.rate("map"),
        )
