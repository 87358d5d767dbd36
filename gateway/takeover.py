"""An escalation: the target takes over from the small model.

    its own cache  ─►  the small model's, mapped  ─►  a full prefill            the first of these that will do
"""

from __future__ import annotations

import time

import structlog

from gateway import handoff
from gateway.account import Account
from gateway.course import Course
from gateway.early import EarlyHandoff
from gateway.handoff import Plan, Prefill, Rates, Transfer, UseOwn
from gateway.native import Native
from gateway.reading import Reader
from gateway.sources import Handed, Read
from gateway.transfers import note_handed, transferred
from gateway.turn import Found
from gateway.upstream.worker import Stream, Worker
from workers.api.errors import KvrelayError, PrefillCheaper

log = structlog.get_logger()


class Takeover:
    """By the course's target, which else answers by `native`. Whoever made it closes it: a handoff that began early may
    be under way."""

    def __init__(self, course: Course, account: Account, reader: Reader, native: Native):
        self._course = course
        self._turn = course.turn
        self._settings = course.parts.settings
        self._account = account
        self._reader = reader
        self.native = native
        self._early: EarlyHandoff | None = None

    @property
    def is_usable(self) -> bool:
        return self._course.target.is_usable

    @property
    def tier(self) -> str:
        return self._course.target.name

    async def answer(self, read: Read | None) -> Stream:
        """The target's answer, from the best that there is; `read` is what the small model has read already."""
        turn = self._turn
        turn.escalated_at, turn.report.path = time.monotonic(), "prefill"
        turn.drop_handoff()  # of a tier below, which will not do
        if not turn.may_map:
            return await self.native.answer()
        if self._early is None and (own := self._own_at_hand()) is not None:
            try:
                num_tokens = own.entry.num_tokens + turn.unread_bytes(own.num_messages)
                return await self.native.from_own(own, num_tokens)
            except KvrelayError as error:
                log.info("own_cache_failed", code=error.code)
        try:
            if read is None:
                # Where this tier cannot answer, nobody but the small model is left: it may take all the time there is.
                share = self._settings.deadlines.small_share if self.is_usable else 1.0
                read = await self._reader.read(turn.deadline.share(share))
                turn.escalated_at = time.monotonic()
            return await self._hand_over(read)
        except PrefillCheaper:  # the target's own choice, and no failure
            turn.report.path = "prefill"
            return await self.native.read_in_full()
        except KvrelayError as error:
            return await self.native.fall_back(error)

    def begin_early(self, read: Read | None) -> None:
        """Begins the handoff that is likely to come, where one would."""
        if self._early is not None or read is None or not self._turn.may_map or not self.is_usable:
            return
        worker, plan = self._plan(read)
        if isinstance(plan, Transfer) and self._own_at_hand() is None:
            self._early = EarlyHandoff(transferred(self._course, read, worker, plan), self._course.parts.metrics)

    def let_go(self) -> None:
        """There will be no escalation."""
        if self._early is not None:
            self._early.let_go()

    async def aclose(self) -> None:
        if self._early is not None:
            await self._early.aclose()

    def _own_at_hand(self) -> Found | None:
        """A cache of its own that leaves little unread: with it the target needs no help of the small model's."""
        own = self._turn.known[self._course.target.name].best()
        if own is None or own.num_messages < self._turn.num_stable:
            return None
        unread = self._turn.unread_bytes(own.num_messages)
        return own if unread <= self._settings.handoff.max_unread_bytes else None

    def _plan(self, read: Read) -> tuple[Worker, Plan]:
        """By the counts and rates at hand."""
        known, target = self._turn.known[self._course.target.name], self._course.target
        worker = target.pick_to_take_over(preferred=known.found[0].entry.worker if known.found else None)
        rates = Rates(_pace(worker, read.worker), worker.map_tokens_per_s)
        remaining_s, settings = self._turn.deadline.remaining_s, self._settings
        return worker, handoff.plan(
            read.num_tokens, known.found, rates, remaining_s, settings.handoff, settings.deadlines
        )

    async def _hand_over(self, read: Read) -> Stream:
        """Carries the plan out; or what is left of a handoff that has begun."""
        if self._early is not None:
            self._turn.report.early_handoff = True
            with self._turn.upstream("transfer"):
                handed = await self._early.result()
            return await self._from_handed(read, handed)
        self._turn.phase = "transfer"
        match self._plan(read):
            case _, UseOwn(found):
                return await self.native.from_own(found, read.num_tokens)
            case worker, Transfer() as plan:
                with self._turn.upstream("transfer"):
                    handed = await transferred(self._course, read, worker, plan)
                return await self._from_handed(read, handed)
            case _, Prefill(reason, failed=True):
                self._account.fell_back(reason)
        return await self.native.read_in_full()

    async def _from_handed(self, read: Read, handed: Handed) -> Stream:
        note_handed(self._course, handed)
        stream = await self.native.from_cache(handed.worker, handed.reply.cache_id, read.num_tokens)
        self._turn.report.path = handed.path
        return stream


def _pace(target: Worker, source: Worker) -> float:
    """Of the target's own reading, in tokens per second: where it was not measured yet, no better than the smaller
    model's, so that the first handoffs on a slow machine have their time."""
    paces = [target.prefill_tokens_per_s, *([] if target.knows_its_pace else [source.prefill_tokens_per_s])]
    return min(paces)
