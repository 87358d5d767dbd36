"""How long a request may still take."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from workers.api.errors import DeadlineExceeded

Clock = Callable[[], float]


@dataclass(frozen=True)
class Deadline:
    """An instant on a monotonic clock, in seconds."""

    at: float
    clock: Clock = field(default=time.monotonic, repr=False)

    @classmethod
    def after(cls, seconds: float, clock: Clock = time.monotonic) -> Deadline:
        return cls(clock() + seconds, clock)

    @property
    def remaining_s(self) -> float:
        return self.at - self.clock()

    def share(self, fraction: float) -> Deadline:
        """The instant at which `fraction` of the time left now will have passed."""
        return Deadline.after(max(0.0, self.remaining_s) * fraction, self.clock)

    def less(self, reserve_s: float) -> Deadline:
        return Deadline(self.at - reserve_s, self.clock)

    def earlier(self, other: Deadline) -> Deadline:
        return self if self.at <= other.at else other

    def later(self, other: Deadline) -> Deadline:
        return self if self.at >= other.at else other

    @asynccontextmanager
    async def bound(self, what: str) -> AsyncIterator[None]:
        """Cancel the block at the deadline, and raise `DeadlineExceeded`."""
        try:
            async with asyncio.timeout(max(0.0, self.remaining_s)):
                yield
        except TimeoutError as error:
            raise DeadlineExceeded(f"{what} took too long") from error
