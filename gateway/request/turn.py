"""`Turn`: one request, the attempts to answer it so far, and all that follows from the two.

    inputs     tenant, request, deadline; the route, chosen before any model runs; what the registry knows
    attempts   Prefill ✓  Answer(small) ✓  Judge ✓  Escalate ✓  Transfer ✗  Answer(large) ✓  Deliver
    derived    path, phase, report, cost: computed, never stored

`steps.next_step` reads a turn and chooses the next step. `run.Run` appends it as an attempt and carries it out.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from gateway.policies import Policy, RoutingDecision, Verdict
from gateway.request.lookup import Lookup, PrefixHit
from gateway.schemas import AnswerRequest, num_stable
from gateway.settings import Settings
from gateway.state.tenants import Tenant
from gateway.upstream.deadline import Deadline
from gateway.upstream.stream import AnswerStream
from gateway.upstream.tier import Tier
from gateway.upstream.worker import Worker
from workers.api.errors import KvrelayError
from workers.api.schemas import MAPPED, KVUsage, Message, Path, PrefillReply, TransferReply

BYTES_PER_TOKEN = 4  # to charge for a prompt whose tokens no worker counted

Phase = Literal["admission", "small_prefill", "small_answer", "transfer", "large_answer", "stream"]
Purpose = Literal["shortcut", "fast", "full_prefill", "last_resort"]


@dataclass(frozen=True)
class Route:
    """Chosen before any model runs. `small` is the first allowed tier; the tiers `above` take over in turn if
    its answer is rejected; `policy` judges. On the route `answer`, `target` answers alone."""

    policy: Policy
    decision: RoutingDecision
    small: Tier
    above: tuple[Tier, ...]

    @property
    def target(self) -> Tier:
        return self.above[-1]

    @property
    def is_single(self) -> bool:
        """One tier answers, and no other in its place."""
        return self.decision.route == "answer"

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """All that may be asked, small to large."""
        return self.above if self.is_single or self.small is self.target else (self.small, *self.above)


@dataclass(frozen=True)
class CacheRef:
    """A cache in a worker's pool: found in the registry (`hit`), filled by a `prefill`, or made by a `transfer`. `path`
    is that of an answer from it. If `is_shadowed`, the worker later compares that answer with native prefill."""

    worker: Worker
    cache_id: str
    num_tokens: int
    path: Path
    hit: PrefixHit | None = None
    prefill: PrefillReply | None = None
    transfer: TransferReply | None = None
    transfer_ms: float | None = None
    is_shadowed: bool = False


# Steps: what can be done next


@dataclass(frozen=True)
class Prefill:
    """The small model prefills the whole prompt. Its cache stays in the worker."""

    tier: Tier
    deadline: Deadline
    wait: Deadline | None  # for a circuit to admit the call; None: do not wait


@dataclass(frozen=True)
class Transfer:
    """Map the first `num_tokens` of `source` into the pool of `worker`, by the deadline. `to_small`: from a tier above
    to the small model, whose answer is due by `answer_deadline`. `is_early`: it was started while the small model's
    answer was still judged."""

    tier: Tier
    worker: Worker
    source: CacheRef
    num_tokens: int
    deadline: Deadline
    to_small: bool = False
    is_early: bool = False
    answer_deadline: Deadline | None = None


@dataclass(frozen=True)
class Answer:
    """Start an answer; its first token is due by `deadline`. With a `cache` its worker answers, else any of the tier
    not in `avoid`.

    shortcut       from a cache at hand; if that fails, other fast paths are left
    fast           from a cache, or by the small model, to be judged
    full_prefill   natively, by one tier
    last_resort    by the small model, because the target cannot answer
    """

    tier: Tier
    deadline: Deadline
    wait: Deadline | None
    purpose: Purpose
    cache: CacheRef | None = None
    is_judged: bool = False
    avoid: tuple[str, ...] = ()
    fallback: Fallback | None = None


@dataclass(frozen=True)
class Judge:
    """The policy judges the answer's first tokens. A handoff to `above` may start meanwhile."""

    tier: Tier
    above: Tier
    deadline: Deadline
    wait: Deadline | None


@dataclass(frozen=True)
class Escalate:
    """Stop the rejected answer; `tier` takes over. If it cannot answer, the `rest` may, in turn."""

    tier: Tier
    rest: tuple[Tier, ...] = ()


@dataclass(frozen=True)
class Deliver:
    """Give the answer to the client. If it breaks off before any of it was sent, another may replace it."""

    tier: Tier
    can_be_replaced: bool = False
    fallback: Fallback | None = None


@dataclass(frozen=True)
class Fail:
    """No way to an answer is left."""

    error: KvrelayError


Step = Prefill | Transfer | Answer | Judge | Escalate | Deliver


@dataclass(frozen=True)
class Fallback:
    """Why the fast path was left: an error code, and whose call failed (`small`, `large`; None: neither)."""

    code: str
    model: Literal["small", "large"] | None = None

    @property
    def reason(self) -> str:
        return f"{self.model}_{self.code}" if self.model else self.code


@dataclass
class Attempt:
    """A step that was taken, and its result or its error. As a context manager, it measures the wait for workers."""

    step: Step
    started_at: float = field(default_factory=time.monotonic)
    ended_at: float | None = None
    waited_s: float = 0.0
    worker: Worker | None = None  # of an Answer: the one that was chosen
    has_begun: bool = False  # the call left the queue
    was_cancelled: bool = False
    cache: CacheRef | None = None  # of a Prefill or a Transfer
    stream: AnswerStream | None = None  # of an Answer; of a Judge, the reply to the policy's question
    verdict: Verdict | None = None  # of a Judge
    usage: KVUsage | None = None  # of a Deliver: the worker's report when the reply's headers are sent
    error: KvrelayError | None = None

    def begin(self) -> None:
        self.has_begun = True

    def __enter__(self) -> Attempt:
        self._entered_at = time.monotonic()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.waited_s += time.monotonic() - self._entered_at
        self.was_cancelled = isinstance(error, asyncio.CancelledError)


@dataclass(frozen=True)
class Cost:
    """Tokens to charge: the prompt once, and all that was written; and both by tier."""

    num_read: int
    num_written: int
    by_tier: dict[str, int]


@dataclass
class Turn:
    """One request. `lookups` hold what the registry knows by tier, without caches that turned out to be lost. `early`
    is the transfer that was started on the guess that an escalation will follow."""

    settings: Settings
    tenant: Tenant
    request: AnswerRequest
    deadline: Deadline
    arrived_at: float
    waited_s: float = 0.0  # before the first attempt: for the client's body, and to explain
    client_cache: PrefixHit | None = None  # the one that the client named, if there is such a cache
    route: Route = field(init=False)
    lookups: dict[str, Lookup] = field(default_factory=dict)
    attempts: list[Attempt] = field(default_factory=list)
    early: Transfer | None = None
    explanation: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        self.messages: list[Message] = self.request.for_workers
        self.num_stable = num_stable(self.request.conversation)

    # What the request allows

    @property
    def stores(self) -> bool:
        return not self.request.kvrelay.no_cache

    @property
    def may_map(self) -> bool:
        return self.stores and not self.request.kvrelay.exact

    @property
    def stable_messages(self) -> int | None:
        return self.num_stable or None

    def unread_bytes(self, num_messages: int) -> int:
        """The text after the first `num_messages`."""
        return text_bytes(self.messages[num_messages:])

    # What has happened

    def begin(self, step: Step) -> Attempt:
        attempt = Attempt(step)
        self.attempts.append(attempt)
        return attempt

    @property
    def last(self) -> Attempt | None:
        return self.attempts[-1] if self.attempts else None

    @property
    def leg(self) -> Iterator[Attempt]:
        """The attempts since the last escalation, latest first."""
        for attempt in reversed(self.attempts):
            yield attempt
            if isinstance(attempt.step, Escalate):
                return

    @property
    def escalation(self) -> Attempt | None:
        return next((attempt for attempt in self.leg if isinstance(attempt.step, Escalate)), None)

    @property
    def escalated_at(self) -> float | None:
        """When the escalation was decided, or when the prefill that it waited for ended."""
        at = None
        for attempt in self.leg:
            if isinstance(attempt.step, Prefill) and attempt.cache is not None:
                at = at or attempt.ended_at
            if isinstance(attempt.step, Escalate):
                return at or attempt.started_at
        return None

    @property
    def fallback(self) -> Fallback | None:
        """Why the fast path was left, if it was; the latest reason."""
        for attempt in reversed(self.attempts):
            step = attempt.step
            if isinstance(step, (Answer, Deliver)):
                if step.fallback is not None:
                    return step.fallback
            elif isinstance(step, Escalate):
                break
        return None

    @property
    def small_cache(self) -> CacheRef | None:
        """The small model's own cache of the whole prompt, as far as this turn has used or filled one."""
        for attempt in reversed(self.attempts):
            step = attempt.step
            if isinstance(step, Prefill) and attempt.cache is not None:
                return attempt.cache
            if isinstance(step, Answer) and self.is_small(step.tier) and attempt.stream and step.cache:
                return step.cache if step.cache.transfer is None else None
        return None

    @property
    def answering(self) -> Attempt | None:
        """The latest answer that has begun."""
        for attempt in reversed(self.attempts):
            if isinstance(attempt.step, Answer) and attempt.stream is not None:
                return attempt
        return None

    @property
    def answer_stream(self) -> AnswerStream:
        """That of `answering`, once there is one."""
        assert self.answering is not None and self.answering.stream is not None
        return self.answering.stream

    @property
    def delivery(self) -> Attempt | None:
        attempts = self.attempts
        return attempts[-1] if attempts and isinstance(attempts[-1].step, Deliver) else None

    # What follows

    @property
    def phase(self) -> Phase:
        """Where the request is, for the metric of clients that hang up."""
        for attempt in reversed(self.attempts):
            match attempt.step:
                case Deliver():
                    return "stream"
                case Prefill() | Transfer(to_small=True):
                    return "small_prefill"
                case Transfer():
                    return "transfer"
                case Answer(tier=tier) | Judge(tier=tier):
                    return "small_answer" if self.is_small(tier) else "large_answer"
        return "admission"

    def is_small(self, tier: Tier) -> bool:
        return tier is self.route.small

    @property
    def path(self) -> str:
        """How the prompt got into the answering model: `exact`, `mapped`, `hybrid`, `prefill`, `fallback:<reason>`."""
        if (fallback := self.fallback) is not None:
            return f"fallback:{fallback.reason}"
        delivery = self.delivery
        if delivery is not None and delivery.usage is not None and self._own_prefill is None:
            return delivery.usage.path
        answer = next((one for one in self.leg if isinstance(one.step, Answer) and one.stream is not None), None)
        if answer is None or not isinstance(answer.step, Answer) or answer.step.cache is None:
            return "prefill"
        return answer.step.cache.path

    @property
    def _own_prefill(self) -> PrefillReply | None:
        """The prefill that this turn asked the answering model for: its cache does not count as a hit."""
        answer = self.answering
        if answer is None or not self.is_small(answer.step.tier):
            return None
        return self._prefill

    @property
    def _prefill(self) -> PrefillReply | None:
        caches = (attempt.cache for attempt in reversed(self.attempts) if isinstance(attempt.step, Prefill))
        return next((cache.prefill for cache in caches if cache is not None), None)

    @property
    def ttft_ms(self) -> float | None:
        """From arrival until an answer was ready to be delivered."""
        delivery = self.delivery
        return (delivery.started_at - self.arrived_at) * 1000 if delivery else None

    @property
    def handoff_ttft_ms(self) -> float | None:
        """From the decision to escalate to the first token of the tier that took over, even if its answer broke off."""
        escalated_at, delivered_at = self.escalated_at, None
        if escalated_at is None:
            return None
        for attempt in self.leg:
            if isinstance(attempt.step, Deliver) and not self.is_small(attempt.step.tier):
                delivered_at = attempt.started_at
            elif isinstance(attempt.step, Answer) and attempt.stream is not None and delivered_at is not None:
                return ((attempt.stream.first_at or delivered_at) - escalated_at) * 1000
        return None

    @property
    def overhead_ms(self) -> float:
        """The part of `ttft_ms` that was spent neither on the client's body nor on workers."""
        delivery = self.delivery
        waited_s = self.waited_s + sum(attempt.waited_s for attempt in self.attempts if attempt is not delivery)
        return max(0.0, (self.ttft_ms or 0.0) - waited_s * 1000)

    @property
    def tier_name(self) -> str | None:
        """The tier that answers, once it does."""
        return self.delivery.step.tier.name if self.delivery else None

    @property
    def model(self) -> str:
        """The answering model's public name."""
        return self.delivery.step.tier.model if self.delivery else ""

    def report(self) -> dict[str, Any]:
        """The reply's `kvrelay` field. Times in milliseconds, counts in tokens; null for what did not happen.

        `handoff_tokens` were handed over to the answering model, native head included; `mapped_tokens` of what it
        attended over came from a mapper; `prefill_ms` is the answering model's own prefill.
        """
        decision, delivery, answer = self.route.decision, self.delivery, self.answering
        verdict = next((one.verdict for one in reversed(self.attempts) if one.verdict is not None), None)
        own_prefill, prefill = self._own_prefill, self._prefill
        usage = answer.stream.completion.kv if delivery and answer and answer.stream else None
        cache = answer.step.cache if answer and isinstance(answer.step, Answer) else None
        transfer = cache.transfer if cache else None
        mapper = transfer.mapper if transfer else None
        if usage is not None and usage.provenance.startswith(MAPPED):  # maybe mapped for an earlier request
            mapper = usage.provenance.removeprefix(MAPPED)
        cached_tokens = usage.cached_tokens if usage else None
        report = {
            "tier": self.tier_name,
            "path": self.path,
            "policy": decision.policy,
            "reason": verdict.reason if verdict else decision.reason,
            "rule": decision.rule,
            "forced": decision.forced,
            "confidence": verdict.confidence if verdict else None,
            "ttft_ms": self.ttft_ms,
            "handoff_ttft_ms": self.handoff_ttft_ms,
            "small_prefill_ms": prefill.prefill_ms if prefill else None,
            "prefill_ms": usage.prefill_ms if usage else None,
            "map_ms": transfer.map_ms if transfer else None,
            "copy_ms": transfer.copy_ms if transfer else None,
            "transfer_ms": cache.transfer_ms if cache else None,
            "bytes": transfer.bytes if transfer else None,
            "handoff_tokens": transfer.num_tokens if transfer else None,
            "early_handoff": any(isinstance(one.step, Transfer) and one.step.is_early for one in self.attempts),
            "mapped_tokens": usage.mapped_tokens if usage else None,
            "cached_tokens": own_prefill.cached_tokens if own_prefill and usage else cached_tokens,
            "mapper": mapper,
            "top1_agreement": usage.top1_agreement if usage else None,
            "full_prefill_ms": usage.full_prefill_ms if usage else None,
        }
        return report if self.explanation is None else report | {"explained": self.explanation}

    @property
    def streams(self) -> list[AnswerStream]:
        """Every answer of this turn, delivered or not, and every reply to a policy's question."""
        return [attempt.stream for attempt in self.attempts if attempt.stream is not None]

    def cost(self) -> Cost:
        """The prompt counts once, as some worker counted it; estimated if a worker was at it and counted nothing yet.

        A tier pays for the prompt if it answered, or was at work on a call when the client hung up; a queued call costs
        nothing.
        """
        num_prompt, by_tier, is_started = 0, dict[str, int](), False
        for attempt in self.attempts:
            step, stream, tier = attempt.step, attempt.stream, attempt.step.tier.name
            if isinstance(step, Prefill) and attempt.cache is not None:
                num_prompt = max(num_prompt, attempt.cache.num_tokens)
            if isinstance(step, Transfer):
                num_prompt = max(num_prompt, 0 if step.to_small else step.source.num_tokens)
            if isinstance(step, Answer) and step.cache and self.is_small(step.tier) and not self.route.is_single:
                num_prompt = max(num_prompt, 0 if step.cache.transfer else step.cache.num_tokens)
            if stream is not None:
                by_tier[tier] = by_tier.get(tier, 0) + stream.completion.num_written
                if isinstance(step, Answer):
                    is_started, num_prompt = True, max(num_prompt, stream.completion.num_prompt_tokens)
            elif attempt.was_cancelled and attempt.has_begun:
                by_tier.setdefault(tier, 0)
                is_started = True
        num_written = sum(by_tier.values())
        if not num_prompt and is_started:
            num_prompt = estimate_tokens(self.messages)
        return Cost(num_prompt, num_written, {tier: num_prompt + written for tier, written in by_tier.items()})


def text_bytes(messages: Iterable[Message]) -> int:
    return sum(len(message.text.encode()) for message in messages)


def estimate_tokens(messages: Iterable[Message]) -> int:
    return text_bytes(messages) // BYTES_PER_TOKEN
