"""`Bell`: rung when something changed that others may be waiting for; each of them then looks whether it is theirs."""

from __future__ import annotations

import asyncio
from contextlib import suppress


class Bell:
    """For use on one event loop."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def ring(self) -> None:
        rung, self._next = self._next, asyncio.Event()
        rung.set()

    async def heard(self, within_s: float) -> None:
        """Waits for the next ring, so long at most."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._next.wait()
