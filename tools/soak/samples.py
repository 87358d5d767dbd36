"""What each process holds, over time, and whether it grows.

A slope is a straight line through all samples of one part, each life of its process on a level of its own (a process
that was killed begins anew), without each life's start and its first while at work, in which buffers and caches fill.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

WARM_UP_S = 120.0  # of each life, from when it first answered; of a shorter run, a third
SPAN_S = 60.0  # that a life must last behind it to be counted; of a shorter run, a third
MEASURES = ("memory", "descriptors", "threads", "tasks", "segments")
# What may grow, an hour, before it is called a leak. A heap settles over its first thousands of requests, so slower
# growth is below what a run of minutes can tell; one short cache lost a request would be gigabytes. A slope must also
# be three of its own standard errors above that.
BOUNDS = {"memory": 384 * 2**20, "descriptors": 60.0, "threads": 30.0, "tasks": 60.0, "segments": 6.0}
CERTAIN_ERRORS = 3.0


@dataclass(frozen=True)
class Sample:
    """One look at one process. `memory` is what it has to itself, in bytes: the pool, which is shared, is bounded.
    `segments` are what it has under /dev/shm; `tasks` is None for a process that did not tell."""

    part: str
    pid: int
    at_s: float
    memory: int
    descriptors: int
    threads: int
    tasks: float | None = None
    segments: int = 0

    def value(self, measure: str) -> float | None:
        value: float | None = getattr(self, measure)
        return value


@dataclass(frozen=True)
class Slope:
    """Growth by the second. `error` is the standard error of `per_s`."""

    part: str
    measure: str
    per_s: float
    error: float

    @property
    def per_minute(self) -> float:
        return 60 * self.per_s

    @property
    def per_hour(self) -> float:
        return 3600 * self.per_s

    @property
    def is_leak(self) -> bool:
        return 3600 * (self.per_s - CERTAIN_ERRORS * self.error) > BOUNDS[self.measure]


def look_at(part: str, pid: int, at_s: float, tasks: float | None = None) -> Sample | None:
    """None for a process that has ended (Linux)."""
    folder = Path(f"/proc/{pid}")
    try:
        fields = _fields(folder / "status")
        memory = _fields(folder / "smaps_rollup").get("Pss_Anon") or fields["RssAnon"]
        descriptors = len(os.listdir(folder / "fd"))
    except (OSError, KeyError):
        return None
    if not descriptors:  # it has ended meanwhile, and nobody has asked for its status yet
        return None
    return Sample(part, pid, at_s, 1024 * memory, descriptors, fields["Threads"], tasks)


def _fields(path: Path) -> dict[str, int]:
    """The numbers of a `Name:  123 kB` file."""
    lines = (line.split() for line in path.read_text().splitlines())
    return {line[0].rstrip(":"): int(line[1]) for line in lines if len(line) > 1 and line[1].isdigit()}


def slopes(samples: Sequence[Sample], run_s: float) -> list[Slope]:
    """Of each part and measure of which there is enough to tell."""
    warm_up_s, span_s = min(WARM_UP_S, run_s / 3), min(SPAN_S, run_s / 3)
    lives: dict[tuple[str, int], list[Sample]] = defaultdict(list)
    for sample in samples:
        life = lives[sample.part, sample.pid]
        if life or sample.tasks is not None:
            life.append(sample)
    warm = [[one for one in life if one.at_s - life[0].at_s >= warm_up_s] for life in lives.values()]
    parts = list(dict.fromkeys(part for part, _ in lives))
    found = []
    for part in parts:
        of_part = [life for life in warm if life and life[0].part == part and life[-1].at_s - life[0].at_s >= span_s]
        for measure in MEASURES:
            points = [[(s.at_s, v) for s in life if (v := s.value(measure)) is not None] for life in of_part]
            if (line := _line(points)) is not None:
                found.append(Slope(part, measure, *line))
    return found


def _line(lives: Iterable[Sequence[tuple[float, float]]]) -> tuple[float, float] | None:
    """The slope of the least-squares line with a level of its own for each life, and its standard error."""
    centred = [pair for life in lives if len(life) > 2 for pair in _centred(life)]
    spread = sum(x * x for x, _ in centred)
    if len(centred) < 8 or not spread:
        return None
    slope = sum(x * y for x, y in centred) / spread
    residual = sum((y - slope * x) ** 2 for x, y in centred)
    return slope, math.sqrt(residual / (len(centred) - 2) / spread)


def _centred(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    mean_x, mean_y = (sum(values) / len(points) for values in zip(*points, strict=True))
    return [(x - mean_x, y - mean_y) for x, y in points]
