"""Work for idle time: a little at a time, while nobody waits for anything else."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import structlog

from workers.api.errors import KvrelayError, Overloaded
from workers.engines.base import Engine

log = structlog.get_logger()

R = TypeVar("R")

STEP_TOKENS = 64  # what real work waits for at most
PATIENCE_S = 60.0  # the longest wait for one step: what the work holds is pinned meanwhile


class IdleTime:
    """The time of an engine that has been idle for `idle_s`."""

    def __init__(self, engine: Engine, idle_s: float, *, patience_s: float = PATIENCE_S):
        self._engine = engine
        self._idle_s = idle_s
        self._patience_s = patience_s

    async def run(self, work: Callable[[], Awaitable[bool]], what: str, count_failure: Callable[[str], None]) -> None:
        """For ever does `work`, which tells whether there was any. What fails is counted by its code, and logged where
        it is a bug."""
        while True:
            await self._until_idle()
            try:
                if await work():
                    continue
            except KvrelayError as error:
                count_failure(error.code)
            except Exception:
                log.exception(f"{what}_failed")
                count_failure("internal_error")
            await asyncio.sleep(self._idle_s)

    async def step(self, work: Callable[[], Awaitable[R]], what: str, check: Callable[[], None] = lambda: None) -> R:
        """One step of at most `STEP_TOKENS`, of the lowest priority, in idle time, if `check` lets it pass then. Raises
        what that raises, and `Overloaded` where real work leaves no time for it."""
        try:
            async with asyncio.timeout(self._patience_s):
                await self._until_idle(check)
                return await work()
        except TimeoutError as error:
            raise Overloaded(f"no idle time for {self._patience_s:g} s while {what}") from error

    async def _until_idle(self, check: Callable[[], None] = lambda: None) -> None:
        """`check` runs whenever it looks, last of all when it is idle."""
        check()
        while not self._is_idle():
            await asyncio.sleep(min(0.1, self._idle_s))
            check()

    def _is_idle(self) -> bool:
        admission = self._engine.admission
        quiet_s = time.monotonic() - self._engine.compute.busy_at
        return not (admission.num_running or admission.num_waiting) and quiet_s >= self._idle_s
