"""One soak: a stack and a Redis of its own, tenants before it, faults within it, and a watch over it.

1. start     Redis, workers, gateway, the oracle
2. soak      tenants send requests and faults strike, until time is up
3. restore   what is broken is restored; everything must become idle, each worker with one segment
4. stop      no process may be left, and nothing in shared memory
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

from tools import family
from tools.output import render
from tools.soak.checks import Oracle
from tools.soak.faults import FaultInjector, RedisVictim, Victim, WorkerVictim
from tools.soak.load import LoadTenant, Tally, key_hash
from tools.soak.requests import RequestWriter
from tools.soak.watch import BOUNDS, ProcessSample, Slope, Watch, slopes
from tools.stack import STOP_SIGNALS, Say, Stack, free_ports, stop_on_signals

TENANTS = ("default", "ashwood", "birch")
PROGRESS_S = 15.0
START_S = 300.0  # of a stack, beside everything else on this machine
MAX_SHOWN = 10  # violations in the table
RECORD_S = 10.0  # between the samples of a process in the JSON report


# Options and configuration


@dataclass(frozen=True)
class Scale:
    """The load and faults that a family's models bear on two cores. `num_at_once` is per tenant; `request_s` is the
    gateway's deadline; `threshold` that of the confidence policy."""

    request_s: float = 120.0
    max_words: int = 400
    max_tokens: int = 12
    num_at_once: int = 1
    fault_every_s: float = 30.0
    longest_fault_s: float = 20.0
    num_small: int = 1
    threads: int = 2
    pool_bytes: int = 256 * 2**20
    transfer_floor_s: float = 0.0
    threshold: float = -0.8


SCALES: Mapping[str, Scale] = {
    "tiny": Scale(
        request_s=30.0,
        max_words=700,
        max_tokens=16,
        num_at_once=2,
        fault_every_s=10.0,
        longest_fault_s=6.0,
        num_small=2,
        threads=1,
        pool_bytes=16 * 2**20,  # small enough for evictions
        transfer_floor_s=5.0,
        threshold=-2.5,
    ),
}


@dataclass(frozen=True)
class SoakOptions:
    """The options of the command line."""

    family: str
    minutes: float
    seed: int

    @property
    def scale(self) -> Scale:
        return SCALES.get(self.family, Scale())


def _configuration(name: str, folders: Mapping[str, str], scale: Scale, redis_url: str) -> dict[str, Any]:
    """Return the contents of a kvrelay.yaml. Worker ids are unique on this machine."""
    settings = family.configuration(name, dict(folders))
    small, large = settings["workers"].values()
    own = {
        "num_threads": scale.threads,
        "pool_bytes": scale.pool_bytes,
        "upgrade_idle_s": 1.0,
        "native_share": 0.9,
        "grace_s": 0.1,
    }
    ports = enumerate(free_ports(scale.num_small))
    workers = {f"small-{number}": small | {"url": f"http://127.0.0.1:{port}"} for number, port in ports}
    workers["large-0"] = large
    deadlines = {
        "request_s": scale.request_s,
        "decode_reserve_s": scale.request_s / 20,
        "transfer_floor_s": scale.transfer_floor_s,
        "shutdown_grace_s": 0.1,
    }
    return settings | {
        "workers": {f"soak{os.getpid()}.{worker_id}": worker | own for worker_id, worker in workers.items()},
        "tenants": {tenant: {"api_keys": [key_hash(tenant)]} for tenant in TENANTS},
        "deadlines": deadlines,
        "policy": {"name": "confidence", "threshold": scale.threshold, "num_tokens": 4},
        "registry": {"url": redis_url},
    }


# The report


@dataclass
class SoakReport:
    """The result of a soak as a table and as JSON with stable keys."""

    family: str
    seed: int
    minutes: float
    tally: Tally
    faults: FaultInjector
    samples: Sequence[ProcessSample] = ()
    troubles: Sequence[str] = ()
    was_stopped: bool = False

    @property
    def slopes(self) -> list[Slope]:
        return slopes(self.samples, 60 * self.minutes)

    @property
    def verdict(self) -> list[str]:
        """One line for each kind of problem; empty if there is none."""
        counts = self.tally.counts
        problems = {
            "wrong answers": counts["wrong_answer"],
            "answers with another document's canary": counts["leak_of_text"],
            "late answers": counts["late"],
            "errors without an excuse": counts["error"],
        }
        lines = [f"{count} {problem}" for problem, count in problems.items() if count]
        lines += [
            f"{slope.part} leaks {slope.measure}: {_amount(slope, slope.per_hour)} an hour, bound "
            f"{_amount(slope, BOUNDS[slope.measure])}"
            for slope in self.slopes
            if slope.is_leak
        ]
        if not self.tally.num_checked and not self.was_stopped:
            lines.append("no answer was checked")
        return [*lines, *self.troubles]

    def as_json(self) -> dict[str, Any]:
        tally, counts = self.tally, self.tally.counts
        thinned = {(sample.pid, sample.at_s // RECORD_S): sample for sample in self.samples}
        return {
            "family": self.family,
            "seed": self.seed,
            "minutes": self.minutes,
            "stopped": self.was_stopped,
            "requests": tally.num_requests,
            "checked": tally.num_checked,
            "own_canaries": tally.num_own_canaries,
            "wrong_answers": counts["wrong_answer"],
            "leaked_texts": counts["leak_of_text"],
            "late_answers": counts["late"],
            "errors": counts["error"],
            "excused_errors": dict(tally.excused),
            "slowest_s": tally.slowest_s,
            "paths": dict(tally.paths),
            "faults": dict(self.faults.counts),
            "slopes": {f"{slope.part} {slope.measure}": slope.per_minute for slope in self.slopes},
            "samples": [asdict(sample) for sample in thinned.values()],
            "troubles": list(self.troubles),
            "verdict": self.verdict,
            "findings": [asdict(violation) for violation in tally.violations],
        }

    def table(self) -> str:
        tally = self.tally
        counts = [
            ["requests", tally.num_requests],
            ["answers checked", tally.num_checked],
            *([f"  {path}", count] for path, count in sorted(tally.paths.items())),
            *([f"  excused: {what}", count] for what, count in sorted(tally.excused.items())),
            ["slowest, in s", tally.slowest_s],
            *([f"fault: {kind}", count] for kind, count in sorted(self.faults.counts.items())),
        ]
        growth = [
            [slope.part, slope.measure, _amount(slope, slope.per_hour), _amount(slope, BOUNDS[slope.measure])]
            for slope in self.slopes
        ]
        tables = [render(["what", "count"], counts), render(["part", "holds", "growth an hour", "bound"], growth)]
        shown = [f"  {one.kind} {one.request_id}: {one.what}" for one in tally.violations[:MAX_SHOWN]]
        verdict = ["", "wrong: " + "; ".join(self.verdict), *shown] if self.verdict else ["", "nothing was wrong"]
        return "\n" + "\n\n".join(tables) + "\n" + "\n".join(verdict)


def _amount(slope: Slope, value: float) -> str:
    return f"{value / 2**20:.1f} MiB" if slope.measure == "memory" else f"{value:.1f}"


# The run


@dataclass
class SoakRun:
    """The parts of one run, and its stages 2 and 3."""

    options: SoakOptions
    stack: Stack
    faults: FaultInjector
    watch: Watch
    say: Say
    tally: Tally = field(default_factory=Tally)
    was_stopped: bool = False

    @property
    def report(self) -> SoakReport:
        return SoakReport(
            family=self.options.family,
            seed=self.options.seed,
            minutes=self.watch.run_s / 60,
            tally=self.tally,
            faults=self.faults,
            samples=self.watch.samples,
            troubles=self.watch.troubles,
            was_stopped=self.was_stopped,
        )

    async def run(self, folders: Mapping[str, str]) -> None:
        """Run until time is up or a signal arrives, then wait until the stack is idle."""
        stopped, scale = asyncio.Event(), self.options.scale
        async with AsyncExitStack() as opened:
            oracle = await opened.enter_async_context(Oracle(folders, threads=scale.threads))
            for number in STOP_SIGNALS:
                asyncio.get_running_loop().add_signal_handler(number, stopped.set)
            tenants = [await opened.enter_async_context(tenant) for tenant in self._tenants(oracle)]
            load = [tenant.run() for tenant in tenants for _ in range(scale.num_at_once)]
            parts = [*load, self.faults.run(), self.watch.run(), self._report_progress()]
            await run_until(parts, 60 * self.options.minutes, stopped)
        self.was_stopped = stopped.is_set()
        if not self.was_stopped and not self.watch.troubles:
            await self.watch.wait_idle(START_S)  # a killed worker may only just be starting

    def _tenants(self, oracle: Oracle) -> list[LoadTenant]:
        scale, seed = self.options.scale, f"{self.options.family} {self.options.seed}"
        writers = [RequestWriter(name, seed, scale.max_words, scale.max_tokens) for name in TENANTS]
        return [
            LoadTenant(
                self.stack.url,
                writer,
                self.tally,
                self.faults,
                oracle.error_in,
                canaries=lambda: set().union(*(writer.canaries for writer in writers)),
                request_s=scale.request_s,
            )
            for writer in writers
        ]

    async def _report_progress(self) -> None:
        while True:
            await asyncio.sleep(PROGRESS_S)
            tally, left = self.tally, self.options.minutes - self.watch.run_s / 60
            found = ", ".join(f"{count} {kind}" for kind, count in tally.counts.items()) or "nothing wrong"
            faults = sum(self.faults.counts.values())
            self.say(f"{tally.num_requests} requests, {faults} faults, {found}; {left:.1f} min left")


async def run_until(parts: Sequence[Coroutine[Any, Any, None]], seconds: float, stopped: asyncio.Event) -> None:
    """Run all parts concurrently until the time is up, `stopped` is set, or one ends, whose exception is raised."""
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


def soak(options: SoakOptions, say: Say) -> SoakReport:
    """Run all four stages. Raises `StackError` if the stack does not start, or the oracle ends by itself."""
    folders, scale = family.prepare(options.family), options.scale
    with ExitStack() as opened:
        scratch = Path(opened.enter_context(TemporaryDirectory(prefix="kvrelay-soak-")))
        redis = opened.enter_context(_redis(scratch, say))
        config = _configuration(options.family, folders, scale, redis.url if redis else "memory://")
        secret = family.cluster_secret(scratch / "secret")
        with Stack(family.write(config, scratch / "kvrelay.yaml"), secret, scratch) as stack:
            stack.wait_ready(say, START_S)
            workers = [WorkerVictim(stack, worker_id, one["tier"]) for worker_id, one in config["workers"].items()]
            victims: list[Victim] = [*workers, *([redis] if redis else [])]
            faults = FaultInjector(
                victims,
                all_usable=lambda: all(child.is_ready() for child in stack.children),
                rng=random.Random(f"faults {options.seed}"),
                every_s=scale.fault_every_s,
                longest_s=scale.longest_fault_s,
            )
            run = SoakRun(options, stack, faults, Watch(stack, workers), say)
            asyncio.run(run.run(folders))
            stop_on_signals()  # the event loop has replaced the handlers
        run.watch.find_leftovers()
        if run.report.verdict:
            kept = Path(mkdtemp(prefix="kvrelay-soak-logs-"))
            for log in scratch.glob("*.log"):
                shutil.copy(log, kept)
            say(f"logs are kept in {kept}")
    return run.report


@contextmanager
def _redis(scratch: Path, say: Say) -> Iterator[RedisVictim | None]:
    binary = RedisVictim.binary()
    if binary is None:
        say("redis-server is not installed: the registry is in memory, without faults")
        yield None
        return
    with RedisVictim(binary, free_ports(1)[0], scratch) as redis:
        yield redis
