"""An escalation: the target takes over from the small model.

    its own cache  ─►  the small model's, mapped  ─►  a full prefill            the first of these that will do
"""

from __future__ import annotations

import random
import time

import structlog

from gateway import asks, handoff
from gateway.account import Account
from gateway.audit import cache_access
from gateway.course import Course
from gateway.deadline import Deadline
from gateway.early import EarlyHandoff, Handed
from gateway.handoff import Plan, Prefill, Rates, Transfer, UseOwn
from gateway.native import Native
from gateway.reading import Read, Reader
from gateway.turn import Found
from gateway.worker import Stream, Worker
from workers.api.errors import CacheUnusable, KvrelayError, PrefillCheaper

log = structlog.get_logger()


class Takeover:
    """Whoever made it closes it: a handoff that began early may be under way."""

    def __init__(self, course: Course, account: Account, reader: Reader, native: Native):
        self._course = course
        self._turn = course.turn
        self._settings = course.parts.settings
        self._account = account
        self._reader = reader
        self._native = native
        self._early: EarlyHandoff | None = None

    async def answer(self, read: Read | None) -> Stream:
        """The target's answer, from the best that there is; `read` is what the small model has read already."""
        turn = self._turn
        turn.escalated_at = time.monotonic()
        if not turn.may_map:
            return await self._native.answer()
        if self._early is None and (own := self._own_at_hand()) is not None:
            try:
                num_tokens = own.entry.num_tokens + turn.unread_bytes(own.num_messages)
                return await self._native.from_own(own, num_tokens)
            except KvrelayError as error:
                log.info("own_cache_failed", code=error.code)
        try:
            if read is None:
                read = await self._reader.read(turn.deadline.share(self._settings.deadlines.small_share))
                turn.escalated_at = time.monotonic()
            return await self._hand_over(read)
        except PrefillCheaper:  # the target's own choice, and no failure
            turn.report.path = "prefill"
            return await self._native.read_in_full()
        except KvrelayError as error:
            return await self._native.fall_back(error)

    def begin_early(self, read: Read | None) -> None:
        """Begins the handoff that is likely to come, where one would."""
        if self._early is not None or read is None or not self._turn.may_map or not self._course.target.is_usable:
            return
        worker, plan = self._plan(read)
        if isinstance(plan, Transfer) and self._own_at_hand() is None:
            self._early = EarlyHandoff(self._transferred(read, worker, plan), self._course.parts.metrics)

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
        worker = target.pick(preferred=known.found[0].entry.worker if known.found else None)
        rates = Rates(worker.prefill_tokens_per_s, worker.map_tokens_per_s)
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
                return await self._native.from_own(found, read.num_tokens)
            case worker, Transfer() as plan:
                with self._turn.upstream("transfer"):
                    handed = await self._transferred(read, worker, plan)
                return await self._from_handed(read, handed)
            case _, Prefill(reason, failed=True):
                self._account.fell_back(reason)
        return await self._native.read_in_full()

    async def _transferred(self, read: Read, worker: Worker, plan: Transfer) -> Handed:
        """The small model's cache, mapped into the target's pool."""
        turn, parts = self._turn, self._course.parts
        by = Deadline.after(plan.budget_s).earlier(turn.deadline)
        source, num_tokens = read.worker.id, plan.num_tokens
        request = asks.transfer(
            turn, self._settings.handoff, cache_id=read.cache_id, source_worker=source, num_tokens=num_tokens, by=by
        )
        started = time.monotonic()
        try:
            reply = await worker.transfer(request, by)
        except KvrelayError as error:
            parts.metrics.handoffs.labels(error.code).inc()
            if isinstance(error, CacheUnusable) and read.found is not None:
                await parts.prefixes.forget(turn, self._course.small.name, read.found)
            raise
        took_s = time.monotonic() - started
        made, count = reply.cache_id, reply.num_tokens
        cache_access(turn, "transferred", worker=worker.id, cache_id=made, num_tokens=count, source=read.cache_id)
        parts.metrics.handed_over(took_s, reply.num_tokens / worker.prefill_tokens_per_s)
        return Handed(worker, reply, took_s)

    async def _from_handed(self, read: Read, handed: Handed) -> Stream:
        self._turn.report.transferred(handed.reply, handed.took_s * 1000)
        self._turn.is_shadowed = random.random() < self._settings.shadow.share
        stream = await self._native.from_cache(handed.worker, handed.reply.cache_id, read.num_tokens)
        self._turn.report.path = "hybrid" if handed.reply.decision == "hybrid" else "mapped"
        return stream
