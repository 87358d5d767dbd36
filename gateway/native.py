"""The target answers by itself: the route of one tier alone, and the way out of every failure.

    its own cache, where it holds one  ─►  a full prefill  ─►  the next worker  ─►  in need, the small model's answer
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from gateway.account import Account
from gateway.answers import Answers
from gateway.course import Course
from gateway.errors import NoUsableWorker
from gateway.patience import patience
from gateway.turn import Found, Named
from gateway.upstream.deadline import Deadline
from gateway.upstream.fleet import Tier
from gateway.upstream.worker import Stream, Worker
from workers.api.errors import (
    CacheMismatch,
    CacheNotFound,
    CacheUnusable,
    ContextLengthExceeded,
    DeadlineExceeded,
    InvalidRequest,
    KvrelayError,
    Overloaded,
)

# Of the time left:
CACHED_CHAT_SHARE = 0.25  # so much a cache that stands ready gets at least to bring a first token
PLAIN_SHARE = 0.5  # so much a full prefill gets at least, where another tier could answer in its place

FALLBACK_PREFIX = {"small_prefill": "small_", "small_answer": "small_", "large_answer": "large_"}  # by phase


class Native:
    def __init__(self, course: Course, answers: Answers, account: Account):
        self._course = course
        self._turn = course.turn
        self._answers = answers
        self._account = account
        self._was_read_in_full = False  # the last way but the small model's answer

    async def answer(self) -> Stream:
        """From the cache that the client named; else from the target's own exact one where it holds one; else by a full
        prefill."""
        if self._turn.named is not None:
            return await self._from_named(self._turn.named)
        known = self._turn.known.get(self._course.target.name)
        own = known.best(exact_only=True) if known else None
        if own is None:
            return await self.read_in_full()
        try:
            return await self.from_own(own, own.entry.num_tokens + self._turn.unread_bytes(own.num_messages))
        except KvrelayError as error:
            return await self.fall_back(error)

    async def _from_named(self, named: Named) -> Stream:
        found = named.found
        if found is None or (self._turn.request.kvrelay.exact and not found.entry.is_exact):
            self._account.fell_back(CacheMismatch.code if found else CacheNotFound.code)
            return await self.read_in_full()
        try:
            return await self.from_own(found, found.entry.num_tokens + self._turn.unread_bytes(0))
        except KvrelayError as error:
            return await self.fall_back(error)

    async def from_own(self, own: Found, num_tokens: int) -> Stream:
        """From a cache that a worker of the target tier holds. `num_tokens` bounds the prompt's."""
        target = self._course.target
        try:
            stream = await self.from_cache(target.workers[own.entry.worker], own.entry.cache_id, num_tokens)
        except CacheUnusable:
            await self._course.parts.prefixes.forget(self._turn, target.name, own)
            raise
        self._turn.report.path = "exact" if own.entry.is_exact else "mapped"
        return stream

    async def from_cache(self, worker: Worker, cache_id: str, num_tokens: int) -> Stream:
        """Leaves time for a full prefill if no token comes, though a cache that stands ready gets its share."""
        reserve_s = self._course.parts.settings.deadlines.decode_reserve_s
        needed_s = num_tokens / worker.prefill_tokens_per_s + reserve_s
        in_time, fair = self._turn.deadline.less(needed_s), self._turn.deadline.share(CACHED_CHAT_SHARE)
        by = max(in_time, fair, key=lambda deadline: deadline.at)
        if self._may_be_passed_over:
            by = by.earlier(self._turn.deadline.share(PLAIN_SHARE))
        # Another worker of the tier can read in full meanwhile; where there is none, that would wait just as long.
        waits = patience(by, [self._course.target, *self._others])
        return await self._answers.open(worker, by, cache_id=cache_id, judged=self._course.is_judged, patience=waits)

    async def read_in_full(self) -> Stream:
        """A full prefill, on the next worker where one fails before its first token. It leaves time to answer for who
        could in its place: the small model, or a tier above."""
        failed: dict[str, KvrelayError] = {}
        by = self._plain_by
        self._was_read_in_full = True
        while True:
            try:
                return await self._answers.open_by(
                    self._course.target,
                    by,
                    judged=self._course.is_judged,
                    failed=failed,
                    patience=patience(by, self._others),
                )
            except NoUsableWorker as error:
                return await self._from_small_in_need(failed.popitem()[1] if failed else error)
            except DeadlineExceeded as error:
                return await self._from_small_in_need(error)
            except KvrelayError as error:
                if error.status < 500 or error not in failed.values():  # a full queue is the tier's, and no worker's
                    raise

    async def fall_back(self, error: KvrelayError) -> Stream:
        """A full prefill, in place of the fast path that failed."""
        in_small = self._turn.phase.startswith("small")
        if in_small and isinstance(error, InvalidRequest) and not isinstance(error, ContextLengthExceeded):
            raise error  # the client's mistake, which the target would only find again
        self._account.fell_back(FALLBACK_PREFIX.get(self._turn.phase, "") + error.code)
        return await self.read_in_full()

    def instead_of(self, stream: Stream) -> Callable[[KvrelayError], Awaitable[Stream]] | None:
        """The other way to an answer: a full prefill for one on the fast path, the small model's for one of the
        target's. None where the route allows no other, or there is none left."""
        by_small = stream.worker.tier == self._course.small.name
        if self._course.is_answered_alone or (by_small and self._turn.report.fell_back):
            return None
        return self._from_small_in_need if self._was_read_in_full and not by_small else self.fall_back

    async def _from_small_in_need(self, error: KvrelayError) -> Stream:
        """Nobody of the target tier can answer in time: the small model does, where the request leaves the choice to
        us."""
        if not self._small_may_stand_in or isinstance(error, Overloaded) or self._turn.deadline.remaining_s <= 0:
            raise error
        self._account.fell_back(f"large_{error.code}")
        by = self._turn.deadline
        return await self._answers.open_by(self._course.small, by, patience=patience(by))

    @property
    def _plain_by(self) -> Deadline:
        """When a full prefill must have brought a first token. A tier above would have to read it all as well; the
        small model, which has, needs no more than to write."""
        deadline = self._turn.deadline
        fair = deadline.share(PLAIN_SHARE)
        if self._may_be_passed_over:
            return fair
        if self._small_may_stand_in:
            reserve_s = self._course.parts.settings.deadlines.decode_reserve_s
            return max(deadline.less(reserve_s), fair, key=lambda by: by.at)
        return deadline

    @property
    def _may_be_passed_over(self) -> bool:
        """A tier above could answer in the target's place."""
        return self._course.is_judged and self._course.above[-1].is_usable

    @property
    def _others(self) -> list[Tier]:
        """Who could answer in the target's place."""
        course = self._course
        others = [tier for tier in course.above if tier is not course.target] if course.is_judged else []
        if self._small_may_stand_in:
            others.append(course.small)
        return others

    @property
    def _small_may_stand_in(self) -> bool:
        alone, failed = self._course.is_answered_alone, self._turn.report.path.startswith("fallback:small")
        return not (alone or failed or self._course.is_judged)
