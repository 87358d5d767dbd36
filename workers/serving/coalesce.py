"""`Coalescer`: equal work asked for at the same time is done once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Generic, TypeVar

R = TypeVar("R")


class Coalescer(Generic[R]):
    """Those who ask for the same key while it is worked on share the result or the error. The work is stopped when
    the last of them has gone."""

    def __init__(self) -> None:
        self._running: dict[Hashable, asyncio.Task[R]] = {}
        self._waiting: dict[asyncio.Task[R], int] = {}

    async def run(self, key: Hashable, work: Callable[[], Coroutine[Any, Any, R]]) -> R:
        task = self._running.get(key)
        if task is None:
            task = self._running[key] = asyncio.create_task(work())
            task.add_done_callback(_retrieve)
        self._waiting[task] = self._waiting.get(task, 0) + 1
        try:
            return await asyncio.shield(task)
        finally:
            await self._leave(key, task)

    async def _leave(self, key: Hashable, task: asyncio.Task[R]) -> None:
        self._waiting[task] -= 1
        if self._waiting[task]:
            return
        del self._waiting[task]
        if self._running.get(key) is task:
            del self._running[key]
        if not task.done():
            task.cancel()
            await asyncio.wait([task])


def _retrieve(task: asyncio.Task[Any]) -> None:
    """Look at the error, so that asyncio does not report it as lost when everyone has gone."""
    if not task.cancelled():
        task.exception()
