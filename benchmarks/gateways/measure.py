"""The measurements: every gateway in turn, in every round, in front of the same upstream."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from benchmarks.gateways.load import Load, LoadResult
from benchmarks.gateways.processes import Server

MIN_RATE_SHARE = 0.95  # below this share of the rate, requests queued, and latencies mean nothing
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
class Contender:
    """One gateway under load, and its results so far. It gets `share` of the configured number of requests."""

    name: str
    server: Server
    load: Load
    share: float
    cpu_ms: list[float] = field(default_factory=list)
    per_s: list[float] = field(default_factory=list)
    paced: LoadResult = field(default_factory=LoadResult)
    streams: LoadResult = field(default_factory=LoadResult)
    rss_mib: list[float] = field(default_factory=list)
    memory_requests: int = 0
    errors: int = 0

    def count(self, num_requests: int) -> int:
        return max(1, round(num_requests * self.share))


@dataclass(frozen=True)
class Row:
    """The results of one gateway.

    added_*: latency added to the upstream's; None if the gateway could not hold the rate.
    rss_mib: at the start, and after each tenth of `memory_requests`.
    growth_mib: growth of RSS per 10,000 requests, over the second half.
    """

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


async def measure(gateways: list[Contender], upstream: Load, sizes: Sizes) -> list[Row]:
    alone = LoadResult()
    for one in gateways:
        await one.load.closed(WARM_UP, num_connections=sizes.connections)
    for _ in range(sizes.rounds):
        for one in gateways:
            await _saturate(one, sizes)
    for _ in range(sizes.rounds):
        alone.add(await upstream.paced(sizes.per_s, sizes.seconds))
        for one in gateways:
            if can_hold(one.per_s, sizes.per_s):
                one.paced.add(await one.load.paced(sizes.per_s, sizes.seconds))
    for one in gateways:
        one.streams.add(await one.load.streams(sizes.streams, num_words=sizes.stream_words, every_ms=sizes.every_ms))
    return await soak(gateways, sizes, alone)


async def soak(gateways: list[Contender], sizes: Sizes, alone: LoadResult | None = None) -> list[Row]:
    """Measure memory over many requests, and return all results."""
    for one in gateways:
        await _fill(one, sizes)
    return [row_of(one, alone or LoadResult(), sizes.per_s) for one in gateways]


def can_hold(measured_per_s: Iterable[float], per_s: float) -> bool:
    """Whether the saturated throughput reaches the rate. Otherwise the queue would only grow."""
    return max(measured_per_s, default=0.0) >= per_s


def row_of(one: Contender, alone: LoadResult, per_s: float) -> Row:
    held = one.paced.per_s >= MIN_RATE_SHARE * per_s and not one.paced.errors
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
    """Return the growth per 10,000 requests over the second half; None if nothing was measured."""
    half = rss_mib[len(rss_mib) // 2 :]
    if len(half) < 2 or not num_requests:
        return None
    share = (len(half) - 1) / (len(rss_mib) - 1)
    return round((half[-1] - half[0]) / (num_requests * share) * 10_000, 2)


async def _saturate(one: Contender, sizes: Sizes) -> None:
    """Measure maximum throughput, and CPU per request."""
    before_s = one.server.cpu_s
    outcome = await one.load.closed(one.count(sizes.requests), num_connections=sizes.connections)
    one.errors += outcome.errors
    if outcome.num_answered:
        one.cpu_ms.append((one.server.cpu_s - before_s) / outcome.num_answered * 1000)
        one.per_s.append(outcome.per_s)


async def _fill(one: Contender, sizes: Sizes) -> None:
    """Measure memory over many requests."""
    num_requests = one.count(sizes.memory_requests)
    one.rss_mib.append(one.server.rss_mib)
    for _ in range(MEMORY_MARKS):
        outcome = await one.load.closed(num_requests // MEMORY_MARKS, num_connections=sizes.connections)
        one.rss_mib.append(one.server.rss_mib)
        one.errors += outcome.errors
        one.memory_requests += outcome.num_answered


def _added(one: LoadResult, alone: LoadResult, percent: int) -> float | None:
    its, base = one.percentile_ms(percent), alone.percentile_ms(percent)
    return None if its is None or base is None else round(its - base, 2)


def _median(values: list[float]) -> float | None:
    return round(statistics.median(values), 3) if values else None
