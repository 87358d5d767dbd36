"""One soak: a stack and a Redis of its own, tenants before it, faults within, and somebody who watches.

    1. start     Redis, workers, gateway, the oracle
    2. soak      tenants ask and faults strike, until time is up
    3. mend      what is broken is brought back; everything must come to rest, each worker with one segment
    4. stop      no process may be left, and nothing in shared memory
"""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

from tools import family
from tools.soak.faults import Faults, Victim
from tools.soak.load import Seen, Tenant
from tools.soak.oracle import Oracle
from tools.soak.report import Report
from tools.soak.settings import TENANTS, Scale, configuration
from tools.soak.store import Redis
from tools.soak.talks import Writer
from tools.soak.victims import WorkerVictim
from tools.soak.watch import Watch
from tools.stack import STOP_SIGNALS, Say, Stack, free_ports, stop_on_signals

PROGRESS_S = 15.0
START_S = 300.0  # of a stack, with all else that this machine may do


@dataclass(frozen=True)
class Asked:
    """What the command line asks for."""

    family: str
    minutes: float
    seed: int
    scale: Scale


@dataclass
class Soak:
    """What all parts of one run share."""

    asked: Asked
    stack: Stack
    faults: Faults
    watch: Watch
    say: Say
    seen: Seen = field(default_factory=Seen)
    was_stopped: bool = False

    @property
    def report(self) -> Report:
        return Report(
            family=self.asked.family,
            seed=self.asked.seed,
            minutes=self.watch.run_s / 60,
            seen=self.seen,
            faults=self.faults,
            samples=self.watch.samples,
            troubles=self.watch.troubles,
            was_stopped=self.was_stopped,
        )

    async def run(self, folders: Mapping[str, str]) -> None:
        """Stages 2 and 3, whole or up to a signal."""
        stopped = asyncio.Event()
        async with AsyncExitStack() as opened:
            oracle = await opened.enter_async_context(Oracle(folders, threads=self.asked.scale.threads))
            for number in STOP_SIGNALS:
                asyncio.get_running_loop().add_signal_handler(number, stopped.set)
            tenants = [await opened.enter_async_context(tenant) for tenant in self._tenants(oracle)]
            asking = [tenant.run() for tenant in tenants for _ in range(self.asked.scale.num_at_once)]
            parts = [*asking, self.faults.run(), self.watch.run(), self._progress()]
            await until_time_is_up(parts, 60 * self.asked.minutes, stopped)
        self.was_stopped = stopped.is_set()
        if not self.was_stopped and not self.watch.troubles:
            await self.watch.come_to_rest(START_S)  # what was killed may only just be starting

    def _tenants(self, oracle: Oracle) -> list[Tenant]:
        scale, seed = self.asked.scale, f"{self.asked.family} {self.asked.seed}"
        writers = [Writer(name, seed, scale.max_words, scale.max_tokens) for name in TENANTS]
        return [
            Tenant(
                self.stack.url,
                writer,
                self.seen,
                self.faults,
                oracle.wrong,
                canaries=lambda: set().union(*(writer.canaries for writer in writers)),
                request_s=scale.request_s,
            )
            for writer in writers
        ]

    async def _progress(self) -> None:
        while True:
            await asyncio.sleep(PROGRESS_S)
            seen, left = self.seen, self.asked.minutes - self.watch.run_s / 60
            found = ", ".join(f"{count} {kind}" for kind, count in seen.counts.items()) or "nothing wrong"
            faults = sum(self.faults.counts.values())
            self.say(f"{seen.num_requests} requests, {faults} faults, {found}; {left:.1f} min left")


async def until_time_is_up(
    parts: Sequence[Coroutine[Any, Any, None]], seconds: float, stopped: asyncio.Event
) -> None:
    """Runs all parts at once, until the first of them ends (what it raises is raised here), or `stopped` is set."""
    tasks = [asyncio.create_task(part) for part in parts]
    waiting = [*tasks, asyncio.create_task(stopped.wait())]
    try:
        await asyncio.wait(waiting, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        ended = [task for task in tasks if task.done()]
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)
    for task in ended:
        task.result()


def soak(asked: Asked, say: Say) -> Report:
    """Raises `StackError` where the stack does not come up, or the oracle ends by itself."""
    folders = family.prepare(asked.family)
    with ExitStack() as opened:
        scratch = Path(opened.enter_context(TemporaryDirectory(prefix="kvrelay-soak-")))
        redis = opened.enter_context(_redis(scratch, say))
        config = configuration(asked.family, folders, asked.scale, redis_url=redis.url if redis else None)
        secret = family.cluster_secret(scratch / "secret")
        with Stack(family.write(config, scratch / "kvrelay.yaml"), secret, scratch) as stack:
            stack.wait_ready(say, START_S)
            workers = [WorkerVictim(stack, worker_id, one["tier"]) for worker_id, one in config["workers"].items()]
            victims: list[Victim] = [*workers, *([redis] if redis else [])]
            one = Soak(asked, stack, _faults(asked, stack, victims), Watch(stack, workers), say)
            asyncio.run(one.run(folders))
            stop_on_signals()  # the event loop has put others in their place
        one.watch.look_for_leftovers()
        if one.report.wrong:
            say(f"logs are kept in {_kept(scratch)}")
    return one.report


def _kept(scratch: Path) -> Path:
    """A folder of the logs alone, which stays."""
    folder = Path(mkdtemp(prefix="kvrelay-soak-logs-"))
    for log in scratch.glob("*.log"):
        shutil.copy(log, folder)
    return folder


def _faults(asked: Asked, stack: Stack, victims: Sequence[Victim]) -> Faults:
    return Faults(
        victims,
        is_whole=lambda: all(child.is_ready() for child in stack.children),
        rng=random.Random(f"faults {asked.seed}"),
        every_s=asked.scale.fault_every_s,
        longest_s=asked.scale.longest_fault_s,
    )


@contextmanager
def _redis(scratch: Path, say: Say) -> Iterator[Redis | None]:
    binary = Redis.binary()
    if binary is None:
        say("redis-server is not installed: the registry is in memory, and no fault strikes it")
        yield None
        return
    with Redis(binary, free_ports(1)[0], scratch) as redis:
        yield redis
