"""The small model reads the prompt, and answers from the cache of it."""

from __future__ import annotations

from gateway import asks
from gateway.answers import Answers
from gateway.audit import cache_access
from gateway.course import Course
from gateway.descent import answer_from_above
from gateway.patience import patience
from gateway.sources import Read
from gateway.upstream.deadline import Deadline
from gateway.upstream.worker import Stream
from workers.api.errors import CacheUnusable


class Reader:
    def __init__(self, course: Course, answers: Answers):
        self._course = course
        self._turn = course.turn
        self._prefixes = course.parts.prefixes
        self._answers = answers

    async def answer(self, by: Deadline) -> tuple[Read | None, Stream]:
        """The small model's answer under way, to be judged; and the cache that it answers from, if that is its own."""
        if not self._turn.stores:
            waits = patience(by, self._course.above)
            return None, await self._answers.open_by(self._course.small, by, judged=True, patience=waits)
        if (stream := await answer_from_above(self._course, self._answers, by)) is not None:
            return None, stream
        read = await self.read(by)
        try:
            waits = patience(by, self._course.above)
            stream = await self._answers.open(read.worker, by, cache_id=read.cache_id, judged=True, patience=waits)
            self._turn.report.path = "exact" if read.found or read.cached_tokens else "prefill"
            return read, stream
        except CacheUnusable:
            if read.found is None:
                raise
            await self._prefixes.forget(self._turn, self._course.small.name, read.found)
        return await self.answer(by)  # evicted, or lost in a restart: a miss

    async def read(self, by: Deadline) -> Read:
        """The whole prompt in a small worker's cache: found there, or read now and filed."""
        turn, small = self._turn, self._course.small
        known = turn.known[small.name]
        whole, nearest = known.whole, known.best(exact_only=True)
        if whole is not None and small.workers[whole.entry.worker].is_usable:
            self._answers.num_read = whole.entry.num_tokens
            return Read(small.workers[whole.entry.worker], whole.entry.cache_id, whole.entry.num_tokens, whole)
        handoff = self._course.parts.settings.handoff
        with turn.upstream("small_prefill"), self._answers.asking(small.name) as asking:
            worker, reply = await small.ask(
                lambda worker: worker.prefill(asks.prefill(turn, handoff, by), by, asking.begun),
                preferred=nearest.entry.worker if nearest else None,
                patience=patience(by, self._course.above),
            )
        self._answers.num_read = reply.num_tokens
        turn.report.small_read(reply)
        cache_access(turn.tenant, "written", worker=worker.id, cache_id=reply.cache_id, num_tokens=reply.num_tokens)
        await self._prefixes.file_prompt(turn, small.name, worker.id, reply)
        return Read(worker, reply.cache_id, reply.num_tokens, cached_tokens=reply.cached_tokens)
