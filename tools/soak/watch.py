"""Looks at every process of a stack once a second: what it holds, whether it still runs, whether it is at rest."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import httpx

from tools.soak.samples import Sample, look_at
from tools.soak.victims import WorkerVictim
from tools.stack import Child, Stack

SAMPLE_S = 1.0
PROBE_S = 0.5
AT_WORK = ("num_requests_running", "num_requests_waiting")


class Watch:
    """`troubles` are what must not be: a process that ended by itself, one that never comes to rest, segments of dead
    workers."""

    def __init__(self, stack: Stack, workers: Sequence[WorkerVictim]):
        self.samples: list[Sample] = []
        self.troubles: list[str] = []
        self.pids: set[int] = set()  # all that there ever were
        self._stack = stack
        self._workers = workers
        self.run_s = 0.0  # for which it has looked

    async def run(self) -> None:
        """Until it is cancelled, or a process ends by itself."""
        began_at = time.monotonic()
        async with httpx.AsyncClient(timeout=PROBE_S, trust_env=False) as http:
            while not self._note_ended():
                await asyncio.gather(*(self._look_at(http, part, child) for part, child in self._parts()))
                self.run_s = time.monotonic() - began_at
                await asyncio.sleep(SAMPLE_S)

    async def come_to_rest(self, within_s: float) -> None:
        """Until nothing runs or waits any more, and nothing but the living has memory under /dev/shm."""
        until = time.monotonic() + within_s
        async with httpx.AsyncClient(timeout=PROBE_S, trust_env=False) as http:
            while unrest := await self._unrest(http):
                if time.monotonic() > until:
                    self.troubles += [f"{what}, {within_s:g} s after the last request" for what in unrest]
                    return
                await asyncio.sleep(PROBE_S)

    def look_for_leftovers(self) -> None:
        """After the end of the stack."""
        self.troubles += [f"process {pid} is left" for pid in self.pids if _is_alive(pid)]
        self.troubles += [f"{one.name} left {one.num_segments} segments" for one in self._workers if one.num_segments]

    def _parts(self) -> list[tuple[str, Child]]:
        gateway = [("gateway", self._stack.gateway)] if self._stack.gateway else []
        return [*gateway, *((worker.name, worker.child) for worker in self._workers if not worker.is_down)]

    def _note_ended(self) -> bool:
        ended = [(part, child) for part, child in self._parts() if child.ended]
        self.troubles += [
            f"{part} ended by itself with status {child.process.returncode}; its log ends:\n{child.log_tail()}"
            for part, child in ended
        ]
        return bool(ended)

    async def _look_at(self, http: httpx.AsyncClient, part: str, child: Child) -> None:
        self.pids.add(child.pid)
        tasks = await _gauge(http, child, "asyncio_tasks")
        sample = await asyncio.to_thread(look_at, part, child.pid, time.monotonic(), tasks)
        if sample is not None:
            num_segments = sum(worker.num_segments for worker in self._workers if worker.name == part)
            self.samples.append(replace(sample, segments=num_segments))

    async def _unrest(self, http: httpx.AsyncClient) -> list[str]:
        unrest = []
        for part, child in self._parts():
            counts = [await _gauge(http, child, name) for name in AT_WORK]
            if None in counts:
                unrest.append(f"{part} does not answer")
            elif any(counts):
                unrest.append(f"{part} still runs or keeps waiting {sum(filter(None, counts)):g} requests")
        return unrest + [
            f"{worker.name} has {worker.num_segments} segments" for worker in self._workers if worker.num_segments != 1
        ]


async def _gauge(http: httpx.AsyncClient, child: Child, name: str) -> float | None:
    """The sum over its labels; None for a process that does not tell."""
    try:
        exposed = (await http.get(f"{child.url}/metrics")).text
    except httpx.HTTPError:
        return None
    lines = (line for line in exposed.splitlines() if line.startswith((f"kvrelay_{name} ", f"kvrelay_{name}{{")))
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def _is_alive(pid: int) -> bool:
    """Whether it runs; one that has ended and that nobody has asked for yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
