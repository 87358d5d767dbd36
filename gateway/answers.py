"""The answers that workers were asked for in the course of one request, told or not."""

from __future__ import annotations

from contextlib import AsyncExitStack

from gateway import asks
from gateway.audit import cache_access
from gateway.course import Course
from gateway.deadline import Deadline
from gateway.fleet import Tier
from gateway.patience import patience
from gateway.worker import Question, Stream, Worker
from workers.api.errors import KvrelayError

MAX_INTERVAL_S = 0.25
INTERVAL_SHARE = 0.25  # of the longest gap that settings allow
GAP_SHARE = 0.25  # of the time left so much, at most, passes between two tokens of an answer that can be replaced
GAP_INTERVALS = 2  # but not less than what a worker may let pass by itself
BYTES_PER_TOKEN = 4  # of a prompt that is charged for though no worker came to tell how long it is


class Answers:
    """Opens a turn's answers, and tells of all of them together what they have read and written."""

    def __init__(self, course: Course):
        self.num_read = 0  # tokens of the prompt, as far as a worker has told them before it answered
        self._course = course
        self._streams: list[Stream] = []

    async def aclose(self) -> None:
        """Hangs up on whatever worker is still at one."""
        if under_way := [stream for stream in self._streams if not stream.is_closed]:
            async with AsyncExitStack() as closing:
                for stream in under_way:
                    closing.push_async_callback(stream.aclose)

    async def open(
        self,
        worker: Worker,
        first_by: Deadline,
        *,
        cache_id: str | None = None,
        judged: bool = False,
        patience: Deadline | None = None,
    ) -> Stream:
        """Under way, with its first content there."""
        course, request = self._course, self._request(cache_id, judged)
        if cache_id is not None:
            cache_access(course.turn.tenant, "read", worker=worker.id, cache_id=cache_id)
        with course.turn.upstream(self.phase(worker.tier)):
            return await self._noted(worker, request, first_by, course.turn.deadline, patience)

    async def open_by(
        self,
        tier: Tier,
        first_by: Deadline,
        *,
        judged: bool = False,
        failed: dict[str, KvrelayError] | None = None,
        patience: Deadline | None = None,
    ) -> Stream:
        """As `open`, without a cache, by whom of the tier `Tier.ask` asks."""
        turn = self._course.turn
        with turn.upstream(self.phase(tier.name)):
            _, stream = await tier.ask(
                lambda worker: self._noted(worker, self._request(None, judged), first_by, turn.deadline),
                failed=failed,
                patience=patience,
            )
            return stream

    async def ask_about(self, stream: Stream, question: str, by: Deadline) -> Stream:
        """What the worker of an answer that is whole says about it, in one token."""
        num_top = self._course.policy.num_top_logprobs
        request = asks.follow_up(self._course.turn, stream.answer, question, num_top, by)
        return await self._noted(stream.worker, request, by, by, patience(by, self._course.above))

    async def _noted(
        self,
        worker: Worker,
        request: Question,
        first_by: Deadline,
        deadline: Deadline,
        patience: Deadline | None = None,
    ) -> Stream:
        stream = await worker.open_answer(request, first_by=first_by, deadline=deadline, patience=patience)
        self._streams.append(stream)
        return stream

    def _request(self, cache_id: str | None, judged: bool) -> Question:
        course = self._course
        return asks.answer(
            course.turn,
            course.parts.settings.handoff,
            cache_id=cache_id,
            judged_by=course.policy if judged else None,
            native=course.is_native,
            interval_ms=0.0 if judged else 1000 * self.interval_s,
        )

    @property
    def max_gap_s(self) -> float:
        """After how long an answer of which nothing comes has stalled, if another can take its place."""
        share_s = max(GAP_SHARE * self._course.turn.deadline.remaining_s, GAP_INTERVALS * self.interval_s)
        return min(self._token_gap_s, share_s)

    @property
    def interval_s(self) -> float:
        """How seldom a worker may tell what it has written: an answer that is told in one piece nobody reads along."""
        if self._course.turn.request.stream:
            return 0.0
        return min(MAX_INTERVAL_S, INTERVAL_SHARE * self._token_gap_s)

    @property
    def _token_gap_s(self) -> float:
        return self._course.parts.settings.deadlines.token_gap_s

    def phase(self, tier: str) -> str:
        return "small_answer" if tier == self._course.small.name else "large_answer"

    @property
    def num_read_once(self) -> int:
        """The prompt's tokens, by whomever they were read."""
        answers = [stream.answer for stream in self._streams]
        num_read = max([self.num_read, *(answer.num_prompt_tokens for answer in answers)])
        if answers and not num_read:
            num_read = self._course.turn.unread_bytes(0) // BYTES_PER_TOKEN
        return num_read

    @property
    def num_written(self) -> int:
        """By every model, told or not."""
        return sum(stream.answer.num_written for stream in self._streams)

    @property
    def by_tier(self) -> dict[str, int]:
        """Of each tier that answered: the prompt once, and all that it wrote."""
        by_tier: dict[str, int] = {}
        for stream in self._streams:
            by_tier.setdefault(stream.worker.tier, self.num_read_once)
            by_tier[stream.worker.tier] += stream.answer.num_written
        return by_tier
