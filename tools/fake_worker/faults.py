"""What goes wrong with the calls of a `FakeWorker`, as its test says."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response

from workers.api.errors import KvrelayError

Body = dict[str, Any]


@dataclass(frozen=True)
class Call:
    """A call that was made: its name, and the body as it came."""

    name: str
    body: dict[str, Any]


@dataclass
class Fault:
    """What goes wrong with the next `times` calls of one kind (None: with all)."""

    error: KvrelayError | None = None
    delay_s: float = 0.0
    garbage: bool = False
    times: int | None = None


class Faulty:
    """Base of the fake: a test tells it what fails, is late, is nonsense, or stands still."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.is_frozen = False
        self._faults: dict[str, Fault] = {}
        self.stalls: dict[str, int] = {}
        self.breaks: dict[str, int] = {}
        self.cuts: dict[str, int] = {}

    def fail(self, call: str, error: KvrelayError, *, times: int | None = None) -> None:
        self._faults[call] = Fault(error=error, times=times)

    def delay(self, call: str, seconds: float, *, times: int | None = None) -> None:
        self._faults[call] = Fault(delay_s=seconds, times=times)

    def garble(self, call: str, *, times: int | None = None) -> None:
        """Answers 200 with something that is no reply of the contract."""
        self._faults[call] = Fault(garbage=True, times=times)

    def stall(self, call: str, *, after: int) -> None:
        """Answers of this kind (`chat`, `cached_chat`) stop after so many words, and stay open until it heals."""
        self.stalls[call] = after

    def break_off(self, call: str, *, after: int) -> None:
        """End answers of this kind with an error frame after so many words."""
        self.breaks[call] = after

    def cut(self, call: str, *, after: int) -> None:
        """End answers of this kind without `[DONE]` after so many words."""
        self.cuts[call] = after

    def heal(self) -> None:
        for faults in (self._faults, self.stalls, self.breaks, self.cuts):
            faults.clear()

    def made(self, name: str) -> list[Body]:
        """The bodies of the calls of one kind."""
        return [call.body for call in self.calls if call.name == name]

    async def with_faults(
        self, name: str, work: Callable[[Body], Awaitable[Body | Response]], body: Body
    ) -> Body | Response:
        """What `work` makes of the body, or what is to go wrong with it."""
        await self.thawed()
        fault = self._next_fault(name)
        await asyncio.sleep(fault.delay_s)
        if fault.error is not None:
            raise fault.error
        return {"nonsense": True} if fault.garbage else await work(body)

    async def thawed(self) -> None:
        # The flag is set from the test's own thread, where an asyncio.Event may not be.
        while self.is_frozen:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    def _next_fault(self, name: str) -> Fault:
        fault = self._faults.get(name, Fault())
        if fault.times is not None:
            fault.times -= 1
            if fault.times < 0:
                return Fault()
        return fault
