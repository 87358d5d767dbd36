"""`Rounds`: one more token for each of several answers, in one step on the compute thread.

    waiting ──► at most `max_rows`, the highest priority first ──► one step ──► each is told its token ──► waiting

Whoever comes during a step joins the next one. For use on one event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from workers.api.logs import exception_fields
from workers.engines.compute import settled

log = logging.getLogger(__name__)

Row = TypeVar("Row")
Told = TypeVar("Told")


class _Place(Generic[Row, Told]):
    def __init__(self, row: Row, priority: int):
        self.row = row
        self.priority = priority
        self.told: asyncio.Future[Told] = asyncio.get_running_loop().create_future()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def tell(self, outcome: Told | Exception) -> None:
        if self.told.done():
            return  # whoever waited has left
        if isinstance(outcome, Exception):
            self.told.set_exception(outcome)
        else:
            self.told.set_result(outcome)


class Rounds(Generic[Row, Told]):
    """`run(rows, priority)` has the compute thread take the step, and gives for each row what it is told, or what went
    wrong with it alone. A step that fails as a whole, and so has left no trace, is taken once more by each row for
    itself: one that is at fault spoils no other's answer."""

    def __init__(self, run: Callable[[Sequence[Row], int], Awaitable[Sequence[Told | Exception]]], max_rows: int):
        self._run = run
        self._max_rows = max_rows
        self._waiting: list[_Place[Row, Told]] = []
        self._turning: asyncio.Task[None] | None = None

    async def join(self, row: Row, *, priority: int = 0) -> Told:
        """What the step of the next round tells of `row`. Cancelled, it leaves before the step or waits it out."""
        place = _Place[Row, Told](row, priority)
        self._waiting.append(place)
        if self._turning is None or self._turning.done():
            self._turning = asyncio.create_task(self._turn())
        try:
            return await place.told
        except asyncio.CancelledError:
            if place in self._waiting:
                self._waiting.remove(place)
            else:
                await settled(place.ended)
            raise

    async def _turn(self) -> None:
        while self._waiting:
            await self._take(self._choose())
            await asyncio.sleep(0)  # whoever was told a token comes again before the next round begins

    def _choose(self) -> list[_Place[Row, Told]]:
        chosen = sorted(self._waiting, key=lambda place: -place.priority)[: self._max_rows]
        self._waiting = [place for place in self._waiting if place not in chosen]
        return chosen

    async def _take(self, places: Sequence[_Place[Row, Told]]) -> None:
        try:
            for place, outcome in zip(places, await self._outcomes(places), strict=True):
                place.tell(outcome)
        finally:
            for place in places:
                place.ended.set_result(None)

    async def _outcomes(self, places: Sequence[_Place[Row, Told]]) -> Sequence[Told | Exception]:
        try:
            return await self._run([place.row for place in places], max(place.priority for place in places))
        except Exception as error:
            if len(places) == 1:
                return [error]
            fields = exception_fields(error)
            log.warning("a round of %d answers failed, and is taken one by one: %s", len(places), fields)
            return [await self._alone(place, error) for place in places]

    async def _alone(self, place: _Place[Row, Told], error: Exception) -> Told | Exception:
        """Nothing is done for who has left meanwhile."""
        return error if place.told.done() else (await self._outcomes([place]))[0]
