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

from gateway.account import Account
from gateway.answers import Answers
from gateway.course import Parts, choose
from gateway.deadline import Deadline
from gateway.gathered import Chunk
from gateway.native import Native
from gateway.policies import Token
from gateway.reading import Read, Reader
from gateway.takeover import Takeover
from gateway.turn import Turn
from gateway.worker import Stream
from workers.api.errors import KvrelayError

GAP_SHARE = 0.25  # of the time left so much, at most, passes between two tokens of an answer that can be replaced


class Cascade:
    """One request. `chunks()` runs once, in one task; closing it hangs up on whatever worker is at it.

    Raises `InvalidRequest`, `ModelNotFound` or `PermissionDenied` when made, for a request that cannot be routed.
    """

    def __init__(self, parts: Parts, turn: Turn):
        self.course = choose(parts, turn)
        self._parts = parts
        self._turn = turn
        self._times = parts.settings.deadlines
        self._account = Account(self.course)
        self._answers = Answers(self.course)
        self._reader = Reader(self.course, self._answers)
        self._native = Native(self.course, self._answers, self._account)
        self._takeover = Takeover(self.course, self._account, self._reader, self._native)

    async def chunks(self) -> AsyncGenerator[Chunk, None]:
        """The answering worker's chunks. By the first one `turn.report` names tier and path, by the end all else."""
        with self._parts.shares.one(self._turn.tenant.name):
            try:
                async with self._answers, aclosing(self._takeover):
                    await self.course.look_up()
                    stream = await self._ROUTES[self.course.decision.route](self)
                    self._account.began(stream)
                    if self._turn.request.stream:
                        async for chunk in self._account.timed(stream):
                            yield chunk
                    else:
                        stream, whole = await self._whole(stream)
                        for chunk in whole:
                            yield chunk
                    await self._account.ended(stream)
            finally:
                answers = self._answers
                await self._parts.spent(self._turn.tenant, answers.num_read_once, answers.num_written)

    async def _whole(self, stream: Stream) -> tuple[Stream, list[Chunk]]:
        """All of an answer that is told in one piece. One that breaks off, or stops before its end, has not been told
        yet: there may be another way to answer."""
        while True:
            instead = self._native.instead_of(stream)
            if instead is not None:
                stream.max_gap_s = min(self._times.token_gap_s, GAP_SHARE * self._turn.deadline.remaining_s)
            try:
                with self._turn.upstream("stream"):
                    return stream, [chunk async for chunk in self._account.timed(stream)]
            except KvrelayError as error:
                if instead is None or self._turn.deadline.remaining_s <= 0:
                    raise
                broken = error
            self._turn.phase = self._answers.phase(stream.worker)
            stream = await instead(broken)
            self._account.answers(stream)

    # The three routes

    async def _answer(self) -> Stream:
        """One tier alone."""
        self._account.decided("answer")
        return await self._native.answer()

    async def _cascade(self) -> Stream:
        """The first tier reads and answers, its first tokens are judged; the target takes over if they won't do."""
        by = self._turn.deadline.share(self._times.small_share)
        try:
            read, stream = await self._reader.answer(by)
            with self._turn.upstream("small_answer"):
                tokens = await self._to_be_judged(read, stream, by)
        except KvrelayError as error:
            self._takeover.let_go()
            return await self._native.fall_back(error)
        verdict = self._account.judged(self.course.policy.judge(tokens))
        if verdict.accept:
            self._takeover.let_go()
            return stream
        if not self.course.target.is_usable:
            self._account.fell_back("large_no_usable_worker")
            return stream
        await stream.aclose()
        return await self._takeover.answer(read)

    async def _escalate(self) -> Stream:
        """The first tier only reads; the target answers."""
        self._account.decided("escalate")
        return await self._takeover.answer(None)

    _ROUTES = {"answer": _answer, "cascade": _cascade, "escalate": _escalate}

    async def _to_be_judged(self, read: Read | None, stream: Stream, by: Deadline) -> list[Token]:
        """The answer's first tokens, fewer where they leave no doubt; or what the small model replies when it is asked
        about its answer. Where an escalation is likely, its handoff begins meanwhile."""
        policy = self.course.policy
        foresight = policy.foresee(stream.answer.tokens)
        while foresight != "certain" and await stream.read_on(policy.num_judged_tokens, by):
            foresight = policy.foresee(stream.answer.tokens)
            if foresight == "likely":
                self._takeover.begin_early(read)
        if policy.follow_up is None:
            return stream.answer.tokens[: policy.num_judged_tokens]
        reply = await self._answers.ask_about(stream, policy.follow_up, by)
        return await reply.first_tokens(1, by)
