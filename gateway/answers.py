"""The answers that workers were asked for in the course of one request, told or not."""

from __future__ import annotations

from contextlib import AsyncExitStack

from gateway import asks
from gateway.audit import cache_access
from gateway.course import Course
from gateway.given_up import Asking
from gateway.patience import patience
from gateway.policies import Token
from gateway.turn import guessed_tokens
from gateway.upstream.deadline import Deadline
from gateway.upstream.fleet import Tier
from gateway.upstream.worker import Question, Stream, Worker
from workers.api.errors import KvrelayError

MAX_INTERVAL_S = 0.25
INTERVAL_SHARE = 0.25  # of the longest gap that settings allow
GAP_SHARE = 0.25  # of the time left so much, at most, passes between two tokens of an answer that can be replaced
GAP_INTERVALS = 2  # but not less than what a worker may let pass by itself


class Answers:
    """Opens a turn's answers, and tells of all of them together what they have read and written."""

    def __init__(self, course: Course):
        self.num_read = 0  # tokens of the prompt, as far as a worker has told them before it answered
        self._asked: list[tuple[str, Asking]] = []  # of which tier
        self._course = course
        self._streams: list[Stream] = []
        self._follow_ups: list[Stream] = []

    async def aclose(self) -> None:
        """Hangs up on whatever worker is still at one. What they have kept is told to the log."""
        if under_way := [stream for stream in self._all if not stream.is_closed]:
            async with AsyncExitStack() as closing:
                for stream in under_way:
                    closing.push_async_callback(stream.aclose)
        for stream in self._streams:
            if (kept := stream.answer.kv) is not None and kept.cache_id is not None:
                tenant, count = self._course.turn.tenant, kept.num_tokens
                cache_access(tenant, "written", worker=stream.worker.id, cache_id=kept.cache_id, num_tokens=count)

    def asking(self, tier: str) -> Asking:
        """For a call to a worker of the tier: who hangs up pays for what it has read."""
        asking = Asking()
        self._asked.append((tier, asking))
        return asking

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
        turn, request = self._course.turn, self._request(cache_id, judged)
        with turn.upstream(self.phase(worker.tier)):
            return await self._opened(self._streams, worker, request, first_by, turn.deadline, patience)

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
                lambda worker: self._opened(
                    self._streams, worker, self._request(None, judged), first_by, turn.deadline
                ),
                failed=failed,
                patience=patience,
            )
            return stream

    async def ask_about(self, stream: Stream, question: str, by: Deadline) -> list[Token]:
        """What the worker of an answer that is whole says about it, in one token; none where it says nothing."""
        num_top = self._course.policy.num_top_logprobs
        request = asks.follow_up(self._course.turn, stream.answer, question, num_top, by)
        waits = patience(by, self._course.above)
        reply = await self._opened(self._follow_ups, stream.worker, request, by, by, waits)
        await reply.read_out()
        return reply.answer.tokens[:1]

    async def _opened(
        self,
        among: list[Stream],
        worker: Worker,
        request: Question,
        first_by: Deadline,
        deadline: Deadline,
        patience: Deadline | None = None,
    ) -> Stream:
        if request.cache_id is not None:
            cache_access(self._course.turn.tenant, "read", worker=worker.id, cache_id=request.cache_id)
        with self.asking(worker.tier) as asking:
            stream = await worker.open_answer(
                request, first_by=first_by, deadline=deadline, patience=patience, on_begun=asking.begun
            )
        among.append(stream)
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
        """After how long an answer of which nothing comes has stalled, if another can take its place. One that is
        probed is followed by the answering model's reading of the whole prompt, which is no standstill."""
        if self._course.turn.request.kvrelay.agreement_probe:
            return self._course.turn.deadline.remaining_s
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
        """The prompt's tokens, by whomever they were read; guessed where no worker came to tell them."""
        num_read = max([self.num_read, *(stream.answer.num_prompt_tokens for stream in self._streams)])
        if not num_read and (self._streams or self._given_up_by):
            num_read = guessed_tokens(self._course.turn.messages)
        return num_read

    @property
    def num_written(self) -> int:
        """By every model, told or not."""
        return sum(stream.answer.num_written for stream in self._all)

    @property
    def by_tier(self) -> dict[str, int]:
        """Of each tier that answered: the prompt once, and all that it wrote."""
        by_tier = dict.fromkeys(self._given_up_by, self.num_read_once)
        for stream in self._all:
            by_tier.setdefault(stream.worker.tier, self.num_read_once)
            by_tier[stream.worker.tier] += stream.answer.num_written
        return by_tier

    @property
    def _given_up_by(self) -> list[str]:
        """The tier that was at it when the client hung up."""
        return [tier for tier, asking in self._asked if asking.was_given_up]

    @property
    def _all(self) -> list[Stream]:
        return [*self._streams, *self._follow_ups]
