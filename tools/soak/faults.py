"""What is broken while the load runs, by a seeded plan: workers and Redis are killed and frozen, and brought back.

`Faults` also remembers when which tier was not whole, from the blow until the gateway finds every tier usable again:
only then may a request that needs the tier end in an error. Redis excuses nothing, since what it holds is a hint.
"""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

POLL_S = 0.1
SETTLED_S = 2.0  # usable for so long: a circuit has had its probes


class Victim(Protocol):
    """What can be broken. `tier` is None for what no answer needs."""

    @property
    def name(self) -> str: ...
    @property
    def tier(self) -> str | None: ...
    def send(self, number: signal.Signals) -> None: ...
    def restart(self) -> None:
        """After a kill."""


@dataclass(frozen=True)
class Fault:
    """One blow, and after how long it is mended."""

    kind: str  # "kill" | "freeze"
    victim: str
    lasts_s: float


def plan(rng: random.Random, victims: Sequence[str], longest_s: float) -> list[Fault]:
    """The next blow; now and then two at once."""
    struck = rng.sample(victims, k=2 if len(victims) > 1 and rng.random() < 0.2 else 1)
    return [Fault(rng.choice(("kill", "freeze")), victim, rng.uniform(0.1, longest_s)) for victim in struck]


@dataclass
class Span:
    """While a tier was not whole; open as long as `ended_at` is None."""

    tier: str
    began_at: float
    ended_at: float | None = None

    def touches(self, began_at: float, ended_at: float) -> bool:
        return self.began_at <= ended_at and (self.ended_at is None or began_at <= self.ended_at)


@dataclass
class Faults:
    """Breaks `victims` one after another until it is cancelled; then mends all that it broke."""

    victims: Sequence[Victim]
    is_whole: Callable[[], bool]  # blocking: every tier is usable
    rng: random.Random
    every_s: float
    longest_s: float
    counts: Counter[str] = field(default_factory=Counter)
    spans: list[Span] = field(default_factory=list)

    def broken_tiers(self, began_at: float, ended_at: float) -> set[str]:
        """Those that were not whole at some time between the two."""
        return {span.tier for span in self.spans if span.touches(began_at, ended_at)}

    async def run(self) -> None:
        by_name = {victim.name: victim for victim in self.victims}
        while True:
            await asyncio.sleep(self.rng.uniform(0.5, 1.5) * self.every_s)
            blows = plan(self.rng, list(by_name), self.longest_s)
            async with self._not_whole({by_name[blow.victim].tier for blow in blows}):
                await asyncio.gather(*(self._strike(by_name[blow.victim], blow) for blow in blows))

    async def _strike(self, victim: Victim, blow: Fault) -> None:
        self.counts[f"{blow.kind} {victim.name}"] += 1
        victim.send(signal.SIGKILL if blow.kind == "kill" else signal.SIGSTOP)
        try:
            await asyncio.sleep(blow.lasts_s)
        finally:
            if blow.kind == "kill":
                victim.restart()
            else:
                victim.send(signal.SIGCONT)

    @asynccontextmanager
    async def _not_whole(self, tiers: set[str | None]) -> AsyncIterator[None]:
        spans = [Span(tier, time.monotonic()) for tier in tiers if tier]
        self.spans += spans
        yield
        if spans:
            await self._settled()
        for span in spans:
            span.ended_at = time.monotonic()

    async def _settled(self) -> None:
        whole_since: float | None = None
        while whole_since is None or time.monotonic() - whole_since < SETTLED_S:
            is_whole = await asyncio.to_thread(self.is_whole)
            whole_since = (whole_since or time.monotonic()) if is_whole else None
            await asyncio.sleep(POLL_S)
