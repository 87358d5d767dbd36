"""The life of a request, from the decision to what is filed for the turn after.

    1. decide       the policy picks the route before any model runs
    2. look up      the prompt's chain hash, in the registry
    3. read         the small model reads the prompt; its cache stays in the worker
    4. answer       the small model answers from that cache, with log-probabilities; the policy judges the first tokens
    5. hand over    not good enough: the large worker maps the small one's cache into its own pool
    6. answer       the large model reads head and tail natively, attends over the rest, and answers
    7. remember     the extended cache is filed for the turn after

What fails or is late in 3-6 is counted, told in the path, and answered by a full prefill. `Cascade` decides and calls;
it knows no HTTP of either side.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass

import structlog

from gateway import asks, handoff, routing
from gateway.audit import cache_access
from gateway.deadline import Deadline
from gateway.early import EarlyHandoff, Handed
from gateway.errors import NoUsableWorker
from gateway.fleet import Fleet, Tier
from gateway.gathered import Chunk
from gateway.handoff import Plan, Prefill, Rates, Transfer, UseOwn
from gateway.limits import Shares
from gateway.metrics import Metrics
from gateway.policies import Token, Verdict
from gateway.prefixes import Prefixes
from gateway.quotas import Quotas
from gateway.settings import Settings
from gateway.turn import Found, Turn
from gateway.worker import Stream, Worker
from workers.api.errors import (
    CacheUnusable,
    ContextLengthExceeded,
    DeadlineExceeded,
    InvalidRequest,
    KvrelayError,
    Overloaded,
    PrefillCheaper,
)

# Of the time left:
CACHED_CHAT_SHARE = 0.25  # so much a handed-over cache gets at least to bring a first token
GAP_SHARE = 0.25  # so much, at most, passes between two tokens of an answer that can still be replaced
PLAIN_SHARE = 0.5  # so much a full prefill gets at least, where the small model could answer in its place

BYTES_PER_TOKEN = 4  # of a prompt that is charged for though no worker came to tell how long it is

log = structlog.get_logger()


@dataclass(frozen=True)
class Parts:
    """What all requests share."""

    settings: Settings
    fleet: Fleet
    prefixes: Prefixes
    metrics: Metrics
    shares: Shares
    quotas: Quotas


@dataclass(frozen=True)
class Read:
    """The small model's cache of the whole prompt; `found` in the registry, or just read (then `cached_tokens` of it
    were there before)."""

    worker: Worker
    cache_id: str
    num_tokens: int
    found: Found | None = None
    cached_tokens: int = 0


class Cascade:
    """One request. `chunks()` runs once, in one task; closing it hangs up on whatever worker is at it.

    Raises `InvalidRequest`, `ModelNotFound` or `PermissionDenied` when made, for a request that cannot be routed.
    """

    def __init__(self, parts: Parts, turn: Turn):
        self._parts = parts
        self._turn = turn
        self._times = parts.settings.deadlines
        self._held = AsyncExitStack()
        self._streams: list[Stream] = []  # all that were opened, told or not
        self._num_read = 0  # tokens of the prompt, as far as a worker has told them
        self._early: EarlyHandoff | None = None
        self._was_read_in_full = False  # by the target: the last way but the small model's answer
        asked, tiers = routing.asked(turn), routing.allowed(turn, parts.fleet)
        chosen = routing.choose_policy(turn.request.kvrelay, parts.settings.chosen_policy)
        self.policy = chosen.select(asked)
        self.decision = routing.decide(turn, asked, chosen, parts.fleet, tiers)
        self.small = parts.fleet.tiers[tiers[0]]
        self.target = parts.fleet.tiers[self.decision.tier]
        turn.report.decided(self.decision)

    async def chunks(self) -> AsyncGenerator[Chunk, None]:
        """The answering worker's chunks. By the first one `turn.report` names tier and path, by the end all else."""
        with self._parts.shares.one(self._turn.tenant.name):
            try:
                async with self._held:
                    await self.look_up()
                    stream = await self._ROUTES[self.decision.route](self)
                    self._began(stream)
                    if self._turn.request.stream:
                        async for chunk in self._timed(stream):
                            yield chunk
                    else:
                        stream, whole = await self._whole(stream)
                        for chunk in whole:
                            yield chunk
                    await self._ended(stream)
            finally:
                await self._parts.quotas.spent(self._turn.tenant, self._num_tokens)

    async def _whole(self, stream: Stream) -> tuple[Stream, list[Chunk]]:
        """All of an answer that is told in one piece. One that breaks off, or stops before its end, has not been told
        yet: there may be another way to answer."""
        while True:
            instead = self._instead_of(stream)
            if instead is not None:
                stream.max_gap_s = min(self._times.token_gap_s, GAP_SHARE * self._turn.deadline.remaining_s)
            try:
                with self._turn.upstream("stream"):
                    return stream, [chunk async for chunk in self._timed(stream)]
            except KvrelayError as error:
                if instead is None or self._turn.deadline.remaining_s <= 0:
                    raise
                broken = error
            self._turn.phase = self._phase(stream.worker)
            stream = await instead(broken)
            self._answers(stream)

    def _instead_of(self, stream: Stream) -> Callable[[KvrelayError], Awaitable[Stream]] | None:
        """The other way to an answer: a full prefill for one on the fast path, the small model's for one of the
        target's. None where the route allows no other, or there is none left."""
        by_small = stream.worker.tier == self.small.name
        if self.decision.route == "answer" or (by_small and self._turn.report.fell_back):
            return None
        return self._from_small_in_need if self._was_read_in_full and not by_small else self._fall_back

    async def _timed(self, stream: Stream) -> AsyncIterator[Chunk]:
        before = stream.last_at
        async for chunk in stream:
            if stream.last_at > before:
                self._parts.metrics.inter_token_latency.labels(stream.worker.tier).observe(stream.last_at - before)
            before = stream.last_at
            yield chunk

    async def look_up(self) -> None:
        """What the registry knows of this prompt, for every tier that may be asked."""
        if self._turn.stores:
            alone = self.decision.route == "answer" or self.small is self.target
            tiers = [self.target] if alone else [self.small, self.target]
            await self._parts.prefixes.look_up(self._turn, tiers)

    # The three routes

    async def _answer(self) -> Stream:
        """One tier alone."""
        self._decided("answer")
        return await self._natively(self.target)

    async def _cascade(self) -> Stream:
        """The first tier reads and answers, its first tokens are judged; the target takes over if they won't do."""
        by = self._turn.deadline.share(self._times.small_share)
        try:
            read, stream = await self._small_answer(by)
            with self._turn.upstream("small_answer"):
                tokens = await self._to_be_judged(read, stream, by)
        except KvrelayError as error:
            return await self._fall_back(error)
        verdict = self._judged(self.policy.judge(tokens))
        if verdict.accept:
            self._let_go_early()
            return stream
        if not self.target.is_usable:
            self._fell_back("large_no_usable_worker")
            return stream
        await stream.aclose()
        return await self._take_over(read)

    async def _to_be_judged(self, read: Read | None, stream: Stream, by: Deadline) -> list[Token]:
        """The answer's first tokens, fewer where they leave no doubt; or what the small model replies when it is asked
        about its answer. Where an escalation is likely, its handoff begins meanwhile."""
        num_judged, foresight = self.policy.num_judged_tokens, self.policy.foresee(stream.answer.tokens)
        while foresight != "certain" and await stream.read_on(num_judged, by):
            foresight = self.policy.foresee(stream.answer.tokens)
            if foresight == "likely":
                self._begin_early(read)
        if self.policy.follow_up is None:
            return stream.answer.tokens[:num_judged]
        request = asks.follow_up(self._turn, stream.answer, self.policy.follow_up, self.policy.num_top_logprobs, by)
        reply = await stream.worker.open_answer(request, first_by=by, deadline=by)
        self._streams.append(reply)
        self._held.push_async_callback(reply.aclose)
        return await reply.first_tokens(1, by)

    async def _escalate(self) -> Stream:
        """The first tier only reads; the target answers."""
        self._decided("escalate")
        return await self._take_over(None)

    _ROUTES = {"answer": _answer, "cascade": _cascade, "escalate": _escalate}

    # 3. and 4.: the small model reads and answers

    async def _small_answer(self, by: Deadline) -> tuple[Read | None, Stream]:
        """The small model's answer under way, and the cache that it answers from."""
        if not self._turn.stores:
            return None, await self._open(self.small.pick(), by, judged=True)
        read = await self._read(by)
        try:
            stream = await self._open(read.worker, by, cache_id=read.cache_id, judged=True)
            self._turn.report.path = "exact" if read.found or read.cached_tokens else "prefill"
            return read, stream
        except CacheUnusable:
            if read.found is None:
                raise
            await self._parts.prefixes.forget(self._turn, self.small.name, read.found)
        return await self._small_answer(by)  # evicted, or lost in a restart: a miss

    async def _read(self, by: Deadline) -> Read:
        """The whole prompt in a small worker's cache: found there, or read now and filed."""
        known = self._turn.known[self.small.name]
        whole, nearest = known.whole, known.best(exact_only=True)
        if whole is not None and self.small.workers[whole.entry.worker].is_usable:
            self._num_read = whole.entry.num_tokens
            return Read(self.small.workers[whole.entry.worker], whole.entry.cache_id, self._num_read, whole)
        with self._turn.upstream("small_prefill"):
            worker = self.small.pick(preferred=nearest.entry.worker if nearest else None)
            reply = await worker.prefill(asks.prefill(self._turn, self._parts.settings.handoff, by), by)
        self._num_read = reply.num_tokens
        self._turn.report.small_read(reply)
        cache_access(self._turn, "written", worker=worker.id, cache_id=reply.cache_id, num_tokens=reply.num_tokens)
        await self._parts.prefixes.file_prompt(self._turn, self.small.name, worker.id, reply)
        return Read(worker, reply.cache_id, reply.num_tokens, cached_tokens=reply.cached_tokens)

    # 5. and 6.: the target takes over

    async def _take_over(self, read: Read | None) -> Stream:
        """The target answers, from the best that there is: its own cache, the small model's, or nothing."""
        self._turn.escalated_at = time.monotonic()
        if not self._turn.may_map:
            return await self._natively(self.target)
        if self._early is None and (own := self._own_at_hand()) is not None:
            try:
                return await self._from_own(own, own.entry.num_tokens + self._turn.unread_bytes(own.num_messages))
            except KvrelayError as error:
                log.info("own_cache_failed", code=error.code)
        try:
            if read is None:
                read = await self._read(self._turn.deadline.share(self._times.small_share))
                self._turn.escalated_at = time.monotonic()
            return await self._hand_over(read)
        except PrefillCheaper:  # the target's own choice, and no failure
            self._turn.report.path = "prefill"
            return await self._plain(self.target)
        except KvrelayError as error:
            return await self._fall_back(error)

    def _own_at_hand(self) -> Found | None:
        """A cache of its own that leaves little unread: with it the target needs no help of the small model's."""
        own = self._turn.known[self.target.name].best()
        if own is None or own.num_messages < self._turn.num_stable:
            return None
        unread = self._turn.unread_bytes(own.num_messages)
        return own if unread <= self._parts.settings.handoff.max_unread_bytes else None

    def _begin_early(self, read: Read | None) -> None:
        """Begins the handoff that is likely to come, where one would."""
        if self._early is not None or read is None or not self._turn.may_map or not self.target.is_usable:
            return
        worker, plan = self._plan(read)
        if isinstance(plan, Transfer) and self._own_at_hand() is None:
            transfer = self._transferred(read, worker, plan)
            self._early = EarlyHandoff(transfer, self._parts.metrics)
            self._held.push_async_callback(self._early.aclose)

    def _let_go_early(self) -> None:
        if self._early is not None:
            self._early.let_go()

    def _plan(self, read: Read) -> tuple[Worker, Plan]:
        """By the counts and rates at hand."""
        known = self._turn.known[self.target.name]
        worker = self.target.pick(preferred=known.found[0].entry.worker if known.found else None)
        rates = Rates(worker.prefill_tokens_per_s, worker.map_tokens_per_s)
        remaining_s, settings = self._turn.deadline.remaining_s, self._parts.settings.handoff
        return worker, handoff.plan(read.num_tokens, known.found, rates, remaining_s, settings, self._times)

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
                return await self._from_own(found, read.num_tokens)
            case worker, Transfer() as plan:
                with self._turn.upstream("transfer"):
                    handed = await self._transferred(read, worker, plan)
                return await self._from_handed(read, handed)
            case _, Prefill(reason, failed=True):
                self._fell_back(reason)
        return await self._plain(self.target)

    async def _transferred(self, read: Read, worker: Worker, plan: Transfer) -> Handed:
        """The small model's cache, mapped into the target's pool."""
        turn, settings, metrics = self._turn, self._parts.settings.handoff, self._parts.metrics
        by = Deadline.after(plan.budget_s).earlier(turn.deadline)
        source, num_tokens = read.worker.id, plan.num_tokens
        request = asks.transfer(
            turn, settings, cache_id=read.cache_id, source_worker=source, num_tokens=num_tokens, by=by
        )
        started = time.monotonic()
        try:
            reply = await worker.transfer(request, by)
        except KvrelayError as error:
            metrics.handoffs.labels(error.code).inc()
            if isinstance(error, CacheUnusable) and read.found is not None:
                await self._parts.prefixes.forget(turn, self.small.name, read.found)
            raise
        took_s = time.monotonic() - started
        made, count = reply.cache_id, reply.num_tokens
        cache_access(turn, "transferred", worker=worker.id, cache_id=made, num_tokens=count, source=read.cache_id)
        metrics.handed_over(took_s, reply.num_tokens / worker.prefill_tokens_per_s)
        return Handed(worker, reply, took_s)

    async def _from_handed(self, read: Read, handed: Handed) -> Stream:
        self._turn.report.transferred(handed.reply, handed.took_s * 1000)
        stream = await self._from_cache(handed.worker, handed.reply.cache_id, read.num_tokens)
        self._turn.report.path = "hybrid" if handed.reply.decision == "hybrid" else "mapped"
        return stream

    async def _from_own(self, own: Found, num_tokens: int) -> Stream:
        """From a cache that a worker of the target tier holds. `num_tokens` bounds the prompt's."""
        tier = self.target
        try:
            stream = await self._from_cache(tier.workers[own.entry.worker], own.entry.cache_id, num_tokens)
        except CacheUnusable:
            await self._parts.prefixes.forget(self._turn, tier.name, own)
            raise
        self._turn.report.path = "exact" if own.entry.is_exact else "mapped"
        return stream

    async def _from_cache(self, worker: Worker, cache_id: str, num_tokens: int) -> Stream:
        """Leaves time for a full prefill if no token comes, though a cache that stands ready gets its share."""
        needed_s = num_tokens / worker.prefill_tokens_per_s + self._times.decode_reserve_s
        in_time, fair = self._turn.deadline.less(needed_s), self._turn.deadline.share(CACHED_CHAT_SHARE)
        return await self._open(worker, max(in_time, fair, key=lambda deadline: deadline.at), cache_id=cache_id)

    # Natively: the route of one tier alone, and the way out of every failure

    async def _natively(self, tier: Tier) -> Stream:
        """From the tier's own exact cache where it holds one, else by a full prefill."""
        known = self._turn.known.get(tier.name)
        own = known.best(exact_only=True) if known else None
        if own is None:
            return await self._plain(tier)
        try:
            return await self._from_own(own, own.entry.num_tokens + self._turn.unread_bytes(own.num_messages))
        except KvrelayError as error:
            return await self._fall_back(error)

    async def _plain(self, tier: Tier) -> Stream:
        """A full prefill, on the next worker where one fails before its first token. It leaves the small model time to
        answer, where that could."""
        failed: dict[str, KvrelayError] = {}
        by = self._turn.deadline
        if self._small_may_stand_in:
            by = max(by.less(self._times.decode_reserve_s), by.share(PLAIN_SHARE), key=lambda deadline: deadline.at)
        self._was_read_in_full = True
        while True:
            try:
                worker = tier.pick(avoid=failed)
            except NoUsableWorker as error:
                return await self._from_small_in_need(failed.popitem()[1] if failed else error)
            try:
                return await self._open(worker, by)
            except DeadlineExceeded as error:
                return await self._from_small_in_need(error)
            except KvrelayError as error:
                if error.status < 500:
                    raise
                failed[worker.id] = error

    async def _fall_back(self, error: KvrelayError) -> Stream:
        """A full prefill, in place of the fast path that failed."""
        self._let_go_early()
        in_small = self._turn.phase.startswith("small")
        if in_small and isinstance(error, InvalidRequest) and not isinstance(error, ContextLengthExceeded):
            raise error  # the client's mistake, which the target would only find again
        prefix = {"small_prefill": "small_", "small_answer": "small_", "large_answer": "large_"}
        self._fell_back(prefix.get(self._turn.phase, "") + error.code)
        return await self._plain(self.target)

    async def _from_small_in_need(self, error: KvrelayError) -> Stream:
        """Nobody of the target tier can answer in time: the small model does, where the request leaves the choice to
        us."""
        if not self._small_may_stand_in or isinstance(error, Overloaded) or self._turn.deadline.remaining_s <= 0:
            raise error
        self._fell_back(f"large_{error.code}")
        return await self._open(self.small.pick(), self._turn.deadline)

    @property
    def _small_may_stand_in(self) -> bool:
        return self.decision.route != "answer" and not self._turn.report.path.startswith("fallback:small")

    async def _open(
        self, worker: Worker, first_by: Deadline, *, cache_id: str | None = None, judged: bool = False
    ) -> Stream:
        # A tier that answers alone answers natively, whatever the registry says of the cache.
        native = self.decision.route == "answer"
        policy, settings = self.policy if judged else None, self._parts.settings.handoff
        request = asks.answer(self._turn, settings, cache_id=cache_id, judged_by=policy, native=native)
        if cache_id is not None:
            cache_access(self._turn, "read", worker=worker.id, cache_id=cache_id)
        with self._turn.upstream(self._phase(worker)):
            stream = await worker.open_answer(request, first_by=first_by, deadline=self._turn.deadline)
        self._streams.append(stream)
        self._held.push_async_callback(stream.aclose)
        return stream

    def _phase(self, worker: Worker) -> str:
        return "small_answer" if worker.tier == self.small.name else "large_answer"

    # What is told, counted and remembered

    def _decided(self, decision: str) -> None:
        report = self._turn.report
        self._parts.metrics.cascade_decisions.labels(report.policy, decision, report.reason).inc()

    def _judged(self, verdict: Verdict) -> Verdict:
        report = self._turn.report
        report.confidence, report.reason = verdict.confidence, verdict.reason
        if verdict.confidence is not None:
            self._parts.metrics.cascade_confidence.observe(verdict.confidence)
        self._decided("accept" if verdict.accept else "escalate")
        return verdict

    def _fell_back(self, reason: str) -> None:
        self._turn.report.path = f"fallback:{reason}"
        self._parts.metrics.full_prefill_fallback.labels(reason).inc()
        log.info("fell_back", request_id=self._turn.id, reason=reason)

    def _began(self, stream: Stream) -> None:
        usage = stream.answer.kv
        if usage is not None:  # told with the first chunk; a stream's header then says what its body will
            self._turn.report.found(usage, by_small=stream.worker.tier == self.small.name)
        self._answers(stream)
        self._parts.metrics.began(self._turn.report, self._turn.overhead_ms)

    def _answers(self, stream: Stream) -> None:
        """This is the answer that is told, unless it breaks off."""
        turn, now = self._turn, time.monotonic()
        turn.began(now)
        turn.report.tier = stream.worker.tier
        turn.model = self._parts.fleet.tiers[stream.worker.tier].model
        if turn.escalated_at is not None and stream.worker.tier == self.target.name:
            turn.report.handoff_ttft_ms = ((stream.first_at or now) - turn.escalated_at) * 1000

    @property
    def _num_tokens(self) -> int:
        """What the turn has cost, however it ended: the prompt once, and all that was written for it, told or not."""
        answers = [stream.answer for stream in self._streams]
        num_read = max([self._num_read, *(answer.num_prompt_tokens for answer in answers)])
        if answers and not num_read:
            num_read = self._turn.unread_bytes(0) // BYTES_PER_TOKEN
        return num_read + sum(answer.num_written for answer in answers)

    async def _ended(self, stream: Stream) -> None:
        """7. The extended cache, for the turn after; and what the worker told of its work."""
        turn, usage = self._turn, stream.answer.kv
        if usage is not None:
            by_small = stream.worker.tier == self.small.name
            turn.report.answered(usage, by_small=by_small, may_rename=not turn.request.stream)
            stream.worker.note_usage(usage, stream.answer.num_prompt_tokens)
            if usage.cache_id is not None:
                kept, count = usage.cache_id, usage.num_tokens
                cache_access(turn, "written", worker=stream.worker.id, cache_id=kept, num_tokens=count)
        if turn.stores:
            await self._parts.prefixes.file_answer(turn, stream)
        self._parts.metrics.ended(turn.report, turn.since_arrival_ms(time.monotonic()))
