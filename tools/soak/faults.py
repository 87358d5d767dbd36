"""Break processes while the load runs: by a seeded plan, workers and Redis are killed or frozen, then restored.

`FaultInjector` records when each tier was broken, from the fault until the gateway finds every tier usable again. Only
then may a request that needs the tier fail. A broken Redis excuses nothing, since its contents are hints.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Protocol

from tools.stack import Child, Stack, deferred_signals, segments
from workers.api.process import die_with_parent

POLL_S = 0.1
SETTLED_S = 2.0  # usable for this long: half-open circuits have closed


# Victims


class Victim(Protocol):
    """A process that can be broken. `tier` is None if no answer needs it."""

    @property
    def name(self) -> str: ...
    @property
    def tier(self) -> str | None: ...
    def send(self, number: signal.Signals) -> None: ...
    def restart(self) -> None:
        """Start it again after it was killed."""


class WorkerVictim:
    """A worker of the stack. `name` is without the prefix that makes its id unique on this machine; `is_down` while a
    fault has killed it."""

    def __init__(self, stack: Stack, worker_id: str, tier: str):
        self.name = worker_id.rpartition(".")[2]
        self.tier = tier
        self.is_down = False
        self._stack = stack
        self._id = worker_id

    @property
    def child(self) -> Child:
        return self._stack.workers[self._id]

    @property
    def num_segments(self) -> int:
        return len(segments(self._id))

    def send(self, number: signal.Signals) -> None:
        self.is_down = self.is_down or number == signal.SIGKILL
        self.child.process.send_signal(number)

    def restart(self) -> None:
        self.child.process.wait()
        self._stack.start_worker(self._id)
        self.is_down = False


class RedisVictim:
    """The soak's own `redis-server` without persistence: empty after a kill. A context manager."""

    name = "redis"
    tier = None

    def __init__(self, binary: str, port: int, folder: Path):
        self._command = [binary, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
        self.url = f"redis://127.0.0.1:{port}/0"

    @staticmethod
    def binary() -> str | None:
        """Return the path of `redis-server`, None if it is not installed."""
        return shutil.which("redis-server")

    def __enter__(self) -> RedisVictim:
        self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()

    def send(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            self._process.send_signal(number)

    def restart(self) -> None:
        self._process.kill()
        self._process.wait()
        self._start()

    def _start(self) -> None:
        with deferred_signals():
            self._process = subprocess.Popen(
                self._command,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=partial(die_with_parent, os.getpid()),
            )


# Faults


@dataclass(frozen=True)
class PlannedFault:
    """`kind` is "kill" or "freeze"; the victim is restored after `lasts_s`."""

    kind: str
    victim: str
    lasts_s: float


def plan(rng: random.Random, victims: Sequence[str], longest_s: float) -> list[PlannedFault]:
    """Draw the next fault; sometimes two at once."""
    struck = rng.sample(victims, k=2 if len(victims) > 1 and rng.random() < 0.2 else 1)
    return [PlannedFault(rng.choice(("kill", "freeze")), victim, rng.uniform(0.1, longest_s)) for victim in struck]


@dataclass
class Outage:
    """The time in which a tier was broken; `ended_at` is None until then."""

    tier: str
    began_at: float
    ended_at: float | None = None

    def overlaps(self, began_at: float, ended_at: float) -> bool:
        return self.began_at <= ended_at and (self.ended_at is None or began_at <= self.ended_at)


@dataclass
class FaultInjector:
    """Breaks the victims until cancelled, and then restores all of them."""

    victims: Sequence[Victim]
    all_usable: Callable[[], bool]  # blocking: whether every tier is usable
    rng: random.Random
    every_s: float
    longest_s: float
    counts: Counter[str] = field(default_factory=Counter)
    outages: list[Outage] = field(default_factory=list)

    def broken_tiers(self, began_at: float, ended_at: float) -> set[str]:
        """Return the tiers that were broken at some time in between."""
        return {outage.tier for outage in self.outages if outage.overlaps(began_at, ended_at)}

    async def run(self) -> None:
        by_name = {victim.name: victim for victim in self.victims}
        while True:
            await asyncio.sleep(self.rng.uniform(0.5, 1.5) * self.every_s)
            faults = plan(self.rng, list(by_name), self.longest_s)
            async with self._outage({by_name[fault.victim].tier for fault in faults}):
                await asyncio.gather(*(self._inject(by_name[fault.victim], fault) for fault in faults))

    async def _inject(self, victim: Victim, fault: PlannedFault) -> None:
        self.counts[f"{fault.kind} {victim.name}"] += 1
        victim.send(signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)
        try:
            await asyncio.sleep(fault.lasts_s)
        finally:
            if fault.kind == "kill":
                victim.restart()
            else:
                victim.send(signal.SIGCONT)

    @asynccontextmanager
    async def _outage(self, tiers: set[str | None]) -> AsyncIterator[None]:
        """Record the tiers as broken, until all have been usable for a while after the block."""
        outages = [Outage(tier, time.monotonic()) for tier in tiers if tier]
        self.outages += outages
        yield
        usable_since: float | None = None
        while outages and (usable_since is None or time.monotonic() - usable_since < SETTLED_S):
            is_usable = await asyncio.to_thread(self.all_usable)
            usable_since = (usable_since or time.monotonic()) if is_usable else None
            await asyncio.sleep(POLL_S)
        for outage in outages:
            outage.ended_at = time.monotonic()
