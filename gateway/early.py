"""A handoff that begins while the small model still writes, because its answer will hardly do.

    small    |─ reads ─|─ t1 t2 t3 ─ ─ ─|✕        likely after t2, certain after t5
    large              |───── transfer ─────|─ answers
                       likely           verdict: what is left of the transfer is all that is waited for

Started on a guess, it is let go where the guess was wrong: the transfer is cancelled. A cache that stands already is
left to expire: equal transfers are one, so that another request may be answering from it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from gateway.metrics import Metrics
from gateway.sources import Handed
from workers.api.tasks import cancel_and_wait


class EarlyHandoff:
    """Either `result` is awaited, once, or it is let go. Whoever made it closes it."""

    def __init__(self, transfer: Coroutine[Any, Any, Handed], metrics: Metrics):
        self._task = asyncio.create_task(transfer)
        self._metrics = metrics
        self._is_used = False

    async def result(self) -> Handed:
        """Raises what the transfer raises."""
        self._is_used = True
        self._metrics.early_handoffs.labels("used").inc()
        return await self._task

    def let_go(self) -> None:
        self._task.cancel()

    async def aclose(self) -> None:
        await cancel_and_wait(self._task)
        if not self._is_used:
            self._metrics.early_handoffs.labels("dropped").inc()
