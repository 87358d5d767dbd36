"""Measured speeds of a worker: `RateMeter` records them, `Costs` predicts from them.

Prefilling a token costs more the more tokens precede it, and a handoff has a fixed cost besides that of each token. So
samples are kept by length, in powers of two. The rate at a length is the median of its samples.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Literal, NamedTuple

from workers.api.schemas import Rates

RateKind = Literal["prefill", "decode", "map", "handoff"]

WINDOW = 64  # samples of each kind
WINDOW_PER_LENGTH = 16
FRESH_S = 600.0  # older samples are not used
CHUNK_TOKENS = 256
MIN_TOKENS: dict[str, int] = {"prefill": 32, "decode": 1, "map": 32, "handoff": 1}


class Sample(NamedTuple):
    at: float
    rate: float


@dataclass(frozen=True)
class Costs:
    """Measured tokens per second, by length: of prefill by the number of preceding tokens (0, 1, 2, 4, ...), of
    handoffs, lease included, by the number of mapped tokens. A length without samples takes its nearest neighbour."""

    prefill: Mapping[int, float] = field(default_factory=dict)
    handoff: Mapping[int, float] = field(default_factory=dict)

    @property
    def are_measured(self) -> bool:
        return bool(self.prefill and self.handoff)

    def prefill_s(self, begin: int, end: int) -> float:
        """Predict the seconds to prefill tokens `[begin, end)` after the earlier ones."""
        starts = range(begin, end, CHUNK_TOKENS)
        return sum((min(end, at + CHUNK_TOKENS) - at) / _nearest(self.prefill, at) for at in starts)

    def handoff_s(self, num_tokens: int) -> float:
        """Predict the seconds to map `num_tokens` tokens."""
        return num_tokens / _nearest(self.handoff, num_tokens) if num_tokens > 0 else 0.0


class RateMeter:
    """Records how long tokens took. Ignores samples of so few tokens that they do not predict long ones."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._samples: dict[str, deque[float]] = {kind: deque(maxlen=WINDOW) for kind in MIN_TOKENS}
        self._by_length: dict[tuple[str, int], deque[Sample]] = defaultdict(lambda: deque(maxlen=WINDOW_PER_LENGTH))

    def record(self, kind: RateKind, num_tokens: int, seconds: float, *, length: int = 0) -> None:
        """Add a sample. `length` is what the rate depends on: the preceding tokens, or the tokens of the handoff."""
        if num_tokens >= MIN_TOKENS[kind] and seconds > 0:
            self._samples[kind].append(num_tokens / seconds)
            self._by_length[kind, _bucket(length)].append(Sample(self._clock(), num_tokens / seconds))

    def rate(self, kind: RateKind) -> float | None:
        """Return the median of tokens per second, None before the first sample."""
        samples = list(self._samples[kind])
        return median(samples) if samples else None

    def by_length(self, kind: RateKind) -> dict[int, float]:
        """Return the medians of fresh samples, by the lower end of each range of lengths."""
        oldest = self._clock() - FRESH_S
        buckets = [(length, list(samples)) for (of, length), samples in list(self._by_length.items()) if of == kind]
        fresh = {length: [rate for at, rate in samples if at >= oldest] for length, samples in buckets}
        return {length: median(rates) for length, rates in sorted(fresh.items()) if rates}

    @property
    def costs(self) -> Costs:
        return Costs(self.by_length("prefill"), self.by_length("handoff"))

    def snapshot(self) -> Rates:
        return Rates(
            prefill_tokens_per_s=self.rate("prefill"),
            decode_tokens_per_s=self.rate("decode"),
            map_tokens_per_s=self.rate("map"),
        )


def _bucket(length: int) -> int:
    """Return the largest power of two that is at most `length`; 0 for 0."""
    return 1 << (length.bit_length() - 1) if length else 0


def _nearest(rates: Mapping[int, float], length: int) -> float:
    return rates[min(rates, key=lambda bucket: abs(bucket.bit_length() - length.bit_length()))]
