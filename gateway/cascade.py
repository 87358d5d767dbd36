"""The life of a request, from the decision to what is filed for the turn after.

    1. decide       the policy picks the route before any model runs                                   `course`
    2. look up      the prompt's chain hash, in the registry                                           `prefixes`
    3. read         the small model reads the prompt; its cache stays in the worker                    `reading`
    4. answer       the small model answers from that cache, with log-probabilities; the policy judges the first tokens
    5. hand over    not good enough: the large worker maps the small one's cache into its own pool     `takeover`
    6. answer       the large model reads head and tail natively, attends over the rest, and answers
    7. remember     the extended cache is filed for the turn after                                     `account`

What fails or is late in 3-6 is counted, told in the path, and answered by a full prefill (`native`). `Cascade` decides
and calls; it knows no HTTP of either side.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

import structlog

from gateway.account import Account
from gateway.answers import Answers
from gateway.course import Course
from gateway.gathered import Chunk, Gathered
from gateway.native import Native
from gateway.policies import Token, Verdict
from gateway.reading import Reader
from gateway.sources import Read
from gateway.takeover import Takeover
from gateway.upstream.deadline import Deadline
from gateway.upstream.fleet import Tier
from gateway.upstream.worker import Stream
from workers.api.errors import KvrelayError

log = structlog.get_logger()


class Cascade:
    """One request. Either `pieces()` or `whole()` runs, once and in one task; ending it early hangs up on whatever
    worker is at it."""

    def __init__(self, course: Course):
        self.course = course
        self._parts = course.parts
        self._turn = course.turn
        self._times = course.parts.settings.deadlines
        self._account = Account(self.course)
        self._answers = Answers(self.course)
        self._reader = Reader(self.course, self._answers)
        self._takeovers = [self._takeover_by(tier) for tier in self.course.above]
        self._native = self._takeovers[-1].native

    def _takeover_by(self, tier: Tier) -> Takeover:
        course = self.course.aimed_at(tier)
        return Takeover(course, self._account, self._reader, Native(course, self._answers, self._account))

    async def pieces(self) -> AsyncGenerator[list[Chunk], None]:
        """The answering worker's chunks, as many at a time as came together. By the first `turn.report` names tier and
        path, by the end all else."""
        with self._parts.shares.one(self._turn.tenant.name):
            try:
                stream = await self._begun()
                self._account.told()
                async for piece in self._account.timed(stream):
                    yield piece
                await self._account.ended(stream)
            finally:
                await self._end()

    async def whole(self) -> Gathered:
        """The same answer in one piece."""
        with self._parts.shares.one(self._turn.tenant.name):
            try:
                stream = await self._read_out(await self._begun())
                self._account.told()
                await self._account.ended(stream)
                return stream.answer
            finally:
                await self._end()

    async def _begun(self) -> Stream:
        """An answer under way."""
        await self.course.look_up()
        stream = await self._ROUTES[self.course.decision.route](self)
        self._account.began(stream)
        return stream

    async def _end(self) -> None:
        """However it ends: whoever is still at work is stopped, and what the turn has cost is charged."""
        answers = self._answers
        try:
            async with aclosing(answers):
                for takeover in self._takeovers:
                    await takeover.aclose()
        finally:
            read, written = answers.num_read_once, answers.num_written
            await self._parts.spent(self._turn.tenant, read, written, by_tier=answers.by_tier)

    async def _read_out(self, stream: Stream) -> Stream:
        """Reads an answer that is told in one piece. One that breaks off, or stops before its end, has not been told
        yet: there may be another way to answer, which is then returned, read out as well."""
        while True:
            instead = self._native.instead_of(stream)
            if instead is not None:
                stream.max_gap_s = self._answers.max_gap_s
            try:
                with self._turn.upstream("stream"):
                    await stream.read_out()
                return stream
            except KvrelayError as error:
                if instead is None or self._turn.deadline.remaining_s <= 0:
                    raise
                broken = error
            self._turn.phase = self._answers.phase(stream.worker.tier)
            stream = await instead(broken)
            self._account.settled_on(stream)

    # The three routes

    async def _answer(self) -> Stream:
        """One tier alone."""
        self._account.decided("answer")
        return await self._native.answer()

    async def _cascade(self) -> Stream:
        """The tiers in turn: one answers, its first tokens are judged, and the next takes over if they won't do."""
        above, by = self._takeovers, self._small_by()
        try:
            read, stream = await self._reader.answer(by)
        except KvrelayError as error:
            return await self._native.fall_back(error)
        while above:
            try:
                verdict = await self._judged(read, stream, above[0], by)
            except KvrelayError as error:
                above[0].let_go()
                return await self._native.fall_back(error)
            wanted = _wanted(above, verdict)
            if above[0] not in wanted:
                above[0].let_go()
            if verdict.accept:
                return stream
            above = [takeover for takeover in wanted if takeover.is_usable]
            if not above:
                self._account.fell_back("large_no_usable_worker")
                return stream
            await stream.aclose()
            stream, above = await self._taken_over(read, above)
            by = self._small_by()
        return stream

    async def _taken_over(self, read: Read | None, above: list[Takeover]) -> tuple[Stream, list[Takeover]]:
        """The answer of the first of these that can give one, and those above it."""
        for index, takeover in enumerate(above[:-1], 1):
            try:
                return await takeover.answer(read), above[index:]
            except KvrelayError as error:
                log.info("tier_passed_over", tier=takeover.tier, code=error.code)
        return await above[-1].answer(read), []

    async def _escalate(self) -> Stream:
        """The first tier only reads; the last answers."""
        self._account.decided("escalate")
        return await self._takeovers[-1].answer(None)

    _ROUTES = {"answer": _answer, "cascade": _cascade, "escalate": _escalate}

    async def _judged(self, read: Read | None, stream: Stream, above: Takeover, by: Deadline) -> Verdict:
        """Whether an answer under way will do. A handoff to the tier above may have begun by then."""
        with self._turn.upstream(self._answers.phase(stream.worker.tier)):
            tokens = await self._to_be_judged(read, stream, above, by)
        return self._account.judged(self.course.policy.judge(tokens))

    async def _to_be_judged(self, read: Read | None, stream: Stream, above: Takeover, by: Deadline) -> list[Token]:
        """The answer's first tokens, fewer where they leave no doubt; or what the model replies when it is asked about
        its answer. Where an escalation is likely, its handoff begins meanwhile."""
        policy = self.course.policy
        foresight = policy.foresee(stream.answer.tokens)
        while foresight != "certain" and await stream.read_on(policy.num_judged_tokens, by):
            foresight = policy.foresee(stream.answer.tokens)
            if foresight == "likely":
                above.begin_early(read)
        if policy.follow_up is None:
            return stream.answer.tokens[: policy.num_judged_tokens]
        return await self._answers.ask_about(stream, policy.follow_up, by)

    def _small_by(self) -> Deadline:
        """Until then an answer that is to be judged, begun now, must have come far enough. Where nobody could take over
        it has all the time there is."""
        if not any(takeover.is_usable for takeover in self._takeovers):
            return self._turn.deadline
        return self._turn.deadline.share(self._times.small_share)


def _wanted(above: list[Takeover], verdict: Verdict) -> list[Takeover]:
    """Who may take over after this verdict."""
    if verdict.accept:
        return []
    return above[-1:] if verdict.leap else above
