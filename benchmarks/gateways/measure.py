"""The measurements: every gateway in turn, in every round, in front of the same upstream."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.gateways.load import Load, Outcome
from benchmarks.gateways.processes import Server

HELD = 0.95  # of the pace: less was not held, and the times of those that waited tell nothing
WARM_UP = 20  # requests
MEMORY_MARKS = 10


@dataclass(frozen=True)
class Sizes:
    rounds: int = 3
    requests: int = 2000
    connections: int = 16
    per_s: float = 200.0
    seconds: float = 4.0
    streams: int = 500
    stream_words: int = 20
    every_ms: int = 250
    memory_requests: int = 100_000


@dataclass
class Measured:
    """One gateway under load. `share` of the requests that count are sent to it."""

    name: str
    server: Server
    load: Load
    share: float
    cpu_ms: list[float] = field(default_factory=list)
    per_s: list[float] = field(default_factory=list)
    paced: Outcome = field(default_factory=Outcome)
    streams: Outcome = field(default_factory=Outcome)
    rss_mib: list[float] = field(default_factory=list)
    memory_requests: int = 0
    errors: int = 0

    def count(self, num_requests: int) -> int:
        return max(1, round(num_requests * self.share))


@dataclass(frozen=True)
class Row:
    """What is told of one. `added_*` is over the upstream alone, None where the pace was not held; `rss_mib` at the
    beginning and after each tenth of `memory_requests`, `growth_mib` its growth for 10,000 of them, over the second
    half: next to nothing where memory is level."""

    gateway: str
    cpu_ms: float | None
    per_s: float | None
    added_p50_ms: float | None
    added_p99_ms: float | None
    streams_whole: int
    streams_dropped: int
    rss_mib: list[float]
    growth_mib: float | None
    memory_requests: int
    errors: int

    def told(self) -> dict[str, Any]:
        return asdict(self)


async def measure(gateways: list[Measured], upstream: Load, sizes: Sizes) -> list[Row]:
    alone = Outcome()
    for one in gateways:
        await one.load.closed(WARM_UP, num_connections=sizes.connections)
    for _ in range(sizes.rounds):
        for one in gateways:
            await _saturated(one, sizes)
    for _ in range(sizes.rounds):
        alone.add(await upstream.paced(sizes.per_s, sizes.seconds))
        for one in gateways:
            if can_hold(one.per_s, sizes.per_s):
                one.paced.add(await one.load.paced(sizes.per_s, sizes.seconds))
    for one in gateways:
        one.streams.add(
            await one.load.streams(sizes.streams, num_words=sizes.stream_words, every_ms=sizes.every_ms)
        )
    return await soak(gateways, sizes, alone)


async def soak(gateways: list[Measured], sizes: Sizes, alone: Outcome | None = None) -> list[Row]:
    """What many requests make of their memory; and what was measured before."""
    for one in gateways:
        await _filled(one, sizes)
    return [row_of(one, alone or Outcome(), sizes.per_s) for one in gateways]


def can_hold(measured_per_s: Iterable[float], per_s: float) -> bool:
    """A gateway that was saturated below the pace is not asked to hold it: its queue would only grow."""
    return max(measured_per_s, default=0.0) >= per_s


def row_of(one: Measured, alone: Outcome, per_s: float) -> Row:
    held = one.paced.per_s >= HELD * per_s and not one.paced.errors
    return Row(
        gateway=one.name,
        cpu_ms=_median(one.cpu_ms),
        per_s=_median(one.per_s),
        added_p50_ms=_added(one.paced, alone, 50) if held else None,
        added_p99_ms=_added(one.paced, alone, 99) if held else None,
        streams_whole=one.streams.num_answered,
        streams_dropped=one.streams.errors,
        rss_mib=[round(mib, 1) for mib in one.rss_mib],
        growth_mib=growth_mib(one.rss_mib, one.memory_requests),
        memory_requests=one.memory_requests,
        errors=one.errors + one.paced.errors,
    )


def growth_mib(rss_mib: Sequence[float], num_requests: int) -> float | None:
    """For 10,000 requests, over the second half of so many; None where nothing was measured."""
    half = rss_mib[len(rss_mib) // 2 :]
    if len(half) < 2 or not num_requests:
        return None
    share = (len(half) - 1) / (len(rss_mib) - 1)
    return round((half[-1] - half[0]) / (num_requests * share) * 10_000, 2)


async def _saturated(one: Measured, sizes: Sizes) -> None:
    """As much as it can take, and what that costs."""
    before_s = one.server.cpu_s
    outcome = await one.load.closed(one.count(sizes.requests), num_connections=sizes.connections)
    one.errors += outcome.errors
    if outcome.num_answered:
        one.cpu_ms.append((one.server.cpu_s - before_s) / outcome.num_answered * 1000)
        one.per_s.append(outcome.per_s)


async def _filled(one: Measured, sizes: Sizes) -> None:
    """Memory, over many requests."""
    num_requests = one.count(sizes.memory_requests)
    one.rss_mib.append(one.server.rss_mib)
    for _ in range(MEMORY_MARKS):
        outcome = await one.load.closed(num_requests // MEMORY_MARKS, num_connections=sizes.connections)
        one.rss_mib.append(one.server.rss_mib)
        one.errors += outcome.errors
        one.memory_requests += outcome.num_answered


def _added(one: Outcome, alone: Outcome, percent: int) -> float | None:
    its, base = one.percentile_ms(percent), alone.percentile_ms(percent)
    return None if its is None or base is None else round(its - base, 2)


def _median(values: list[float]) -> float | None:
    return round(statistics.median(values), 3) if values else None
