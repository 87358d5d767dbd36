"""Watch every process of a stack once a second: its resources and their growth, whether it runs, whether it is idle.

A slope is a least-squares line through all samples of one part. Each process lifetime has its own level, since a killed
process starts over. The start and warm-up of each lifetime are left out: buffers and caches fill then.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import httpx

from tools.soak.faults import WorkerVictim
from tools.stack import Child, Stack

SAMPLE_S = 1.0
PROBE_S = 0.5
BUSY_GAUGES = ("num_requests_running", "num_requests_waiting")
WARM_UP_S = 120.0  # of each lifetime, from its first answer; in a shorter run, a third of it
MIN_SPAN_S = 60.0  # a lifetime counts if it lasts this long after the warm-up; in a shorter run, a third of it
MEASURES = ("memory", "descriptors", "threads", "tasks", "segments")
# Allowed growth per hour. A heap settles over its first thousands of requests, so a run of minutes cannot tell slower
# growth from none; a short cache lost per request would be gigabytes. A slope counts as a leak if it exceeds the bound
# by three standard errors.
BOUNDS = {"memory": 384 * 2**20, "descriptors": 60.0, "threads": 30.0, "tasks": 60.0, "segments": 6.0}
CERTAIN_ERRORS = 3.0


# Samples and slopes


@dataclass(frozen=True)
class ProcessSample:
    """Resources of one process at one time. `memory` is private bytes: the shared pool is bounded. `segments` counts
    its files under /dev/shm; `tasks` is None if the process did not answer."""

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
    """Growth per second. `error` is the standard error of `per_s`."""

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


def sample_process(part: str, pid: int, at_s: float, tasks: float | None = None) -> ProcessSample | None:
    """Sample a process (Linux). None if it has ended."""
    folder = Path(f"/proc/{pid}")
    try:
        fields = _fields(folder / "status")
        memory = _fields(folder / "smaps_rollup").get("Pss_Anon") or fields["RssAnon"]
        descriptors = len(os.listdir(folder / "fd"))
    except (OSError, KeyError):
        return None
    if not descriptors:  # a zombie
        return None
    return ProcessSample(part, pid, at_s, 1024 * memory, descriptors, fields["Threads"], tasks)


def _fields(path: Path) -> dict[str, int]:
    """Return the numbers of a `Name:  123 kB` file."""
    lines = (line.split() for line in path.read_text().splitlines())
    return {line[0].rstrip(":"): int(line[1]) for line in lines if len(line) > 1 and line[1].isdigit()}


def slopes(samples: Sequence[ProcessSample], run_s: float) -> list[Slope]:
    """Return the slopes of each part and measure with enough samples."""
    warm_up_s, min_span_s = min(WARM_UP_S, run_s / 3), min(MIN_SPAN_S, run_s / 3)
    lives: dict[tuple[str, int], list[ProcessSample]] = defaultdict(list)
    for sample in samples:
        life = lives[sample.part, sample.pid]
        if life or sample.tasks is not None:
            life.append(sample)
    by_part: dict[str, list[list[ProcessSample]]] = {part: [] for part, _ in lives}
    for (part, _), life in lives.items():
        warm = [one for one in life if one.at_s - life[0].at_s >= warm_up_s]
        if warm and warm[-1].at_s - warm[0].at_s >= min_span_s:
            by_part[part].append(warm)
    found = []
    for part, warm_lives in by_part.items():
        for measure in MEASURES:
            points = [[(one.at_s, v) for one in life if (v := one.value(measure)) is not None] for life in warm_lives]
            if (line := _fit_line(points)) is not None:
                found.append(Slope(part, measure, *line))
    return found


def _fit_line(lives: Iterable[Sequence[tuple[float, float]]]) -> tuple[float, float] | None:
    """Return the slope of the least-squares line with its own level for each life, and its standard error."""
    centred = []
    for life in lives:
        if len(life) > 2:
            mean_x, mean_y = (sum(values) / len(life) for values in zip(*life, strict=True))
            centred += [(x - mean_x, y - mean_y) for x, y in life]
    spread = sum(x * x for x, _ in centred)
    if len(centred) < 8 or not spread:
        return None
    slope = sum(x * y for x, y in centred) / spread
    residual = sum((y - slope * x) ** 2 for x, y in centred)
    return slope, math.sqrt(residual / (len(centred) - 2) / spread)


# The stack


class Watch:
    """Samples the processes. `troubles` are processes that ended by themselves or never became idle, and what dead
    processes left behind."""

    def __init__(self, stack: Stack, workers: Sequence[WorkerVictim]):
        self.samples: list[ProcessSample] = []
        self.troubles: list[str] = []
        self.pids: set[int] = set()  # of all processes so far
        self._stack = stack
        self._workers = workers
        self.run_s = 0.0

    async def run(self) -> None:
        """Sample until cancelled, or until a process ends by itself."""
        began_at = time.monotonic()
        async with httpx.AsyncClient(timeout=PROBE_S, trust_env=False) as http:
            while not self._any_ended():
                await asyncio.gather(*(self._sample(http, part, child) for part, child in self._parts()))
                self.run_s = time.monotonic() - began_at
                await asyncio.sleep(SAMPLE_S)

    async def wait_idle(self, timeout_s: float) -> None:
        """Wait until no request runs or waits, and only running workers have shared memory."""
        deadline = time.monotonic() + timeout_s
        async with httpx.AsyncClient(timeout=PROBE_S, trust_env=False) as http:
            while activity := await self._activity(http):
                if time.monotonic() > deadline:
                    self.troubles += [f"{what}, {timeout_s:g} s after the last request" for what in activity]
                    return
                await asyncio.sleep(PROBE_S)

    def find_leftovers(self) -> None:
        """Look for processes and segments that outlived the stack."""
        self.troubles += [f"process {pid} is left" for pid in self.pids if _is_alive(pid)]
        self.troubles += [f"{one.name} left {one.num_segments} segments" for one in self._workers if one.num_segments]

    def _parts(self) -> list[tuple[str, Child]]:
        gateway = [("gateway", self._stack.gateway)] if self._stack.gateway else []
        return [*gateway, *((worker.name, worker.child) for worker in self._workers if not worker.is_down)]

    def _any_ended(self) -> bool:
        ended = [(part, child) for part, child in self._parts() if child.ended]
        self.troubles += [
            f"{part} ended by itself with status {child.process.returncode}; its log ends:\n{child.log_tail()}"
            for part, child in ended
        ]
        return bool(ended)

    async def _sample(self, http: httpx.AsyncClient, part: str, child: Child) -> None:
        self.pids.add(child.pid)
        tasks = await _gauge(http, child, "asyncio_tasks")
        sample = await asyncio.to_thread(sample_process, part, child.pid, time.monotonic(), tasks)
        if sample is not None:
            num_segments = sum(worker.num_segments for worker in self._workers if worker.name == part)
            self.samples.append(replace(sample, segments=num_segments))

    async def _activity(self, http: httpx.AsyncClient) -> list[str]:
        activity = []
        for part, child in self._parts():
            counts = [await _gauge(http, child, name) for name in BUSY_GAUGES]
            if None in counts:
                activity.append(f"{part} does not answer")
            elif any(counts):
                activity.append(f"{part} still has {sum(filter(None, counts)):g} requests running or waiting")
        return activity + [
            f"{worker.name} has {worker.num_segments} segments" for worker in self._workers if worker.num_segments != 1
        ]


async def _gauge(http: httpx.AsyncClient, child: Child, name: str) -> float | None:
    """Return a gauge summed over its labels, None if the process does not answer."""
    try:
        exposed = (await http.get(f"{child.url}/metrics")).text
    except httpx.HTTPError:
        return None
    lines = (line for line in exposed.splitlines() if line.startswith((f"kvrelay_{name} ", f"kvrelay_{name}{{")))
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def _is_alive(pid: int) -> bool:
    """Return whether the process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
