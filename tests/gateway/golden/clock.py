"""A clock that skips every wait.

`install` replaces the clocks of the `time` module. The clock does not advance while code runs. When the event loop is
idle, the clock jumps to its next timer. So a wait of a minute takes no time, and a slow machine changes nothing.

Install it before the gateway is imported: some of its defaults bind `time.monotonic` at import.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from typing import Any

EPOCH = 1_700_000_000.0
MAX_WAIT_S = 900.0  # of one case; a longer wait never ends


class Stuck(Exception):
    """A case waits for an event that never happens."""


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0
        self._gives_up_at = self.now + MAX_WAIT_S

    def restart(self) -> None:
        """Reset the clock, so that every case starts at the same time."""
        self.__init__()  # type: ignore[misc]

    def skip(self, seconds: float) -> None:
        self.now += seconds
        if self.now > self._gives_up_at:
            raise Stuck(f"waited for more than {MAX_WAIT_S:g} s")


CLOCK = Clock()


def install() -> None:
    time.monotonic = time.perf_counter = lambda: CLOCK.now
    time.time = lambda: EPOCH + CLOCK.now


class _Selector(selectors.DefaultSelector):
    def select(self, timeout: float | None = None) -> list[Any]:
        events = super().select(0)
        if not events and timeout is None:
            raise Stuck("nothing left to wait for")
        if not events and timeout is not None and timeout > 0:
            CLOCK.skip(timeout)
        return list(events)


def new_loop() -> asyncio.AbstractEventLoop:
    return asyncio.SelectorEventLoop(_Selector())
