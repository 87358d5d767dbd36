"""What a request does next: `next_step`, a function of the turn and of the tiers' present state.
It makes no network call and changes nothing.

    route answer     Answer ──► Deliver
    route escalate   Escalate ─┐
    route cascade    Prefill ──► Answer(small) ──► Judge ──accepted──► Deliver
                               │                     └──rejected──► Escalate ─┐
    an escalation    ◄─────────┴──────────────────────────────────────────────┘
                     Answer from the target's own cache
                     or Transfer the small model's cache ──► Answer from it
                     or Answer by a full prefill
                     ──► Judge, if there is a tier above; else Deliver

    a failure        of a shortcut: the next fast path            of a fast path: a full prefill, named in `fallback`
                     of a full prefill: the next worker, then the small model as a last resort, else Fail

To add a fallback: `_after_failure` has one case per kind of attempt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gateway.errors import NoUsableWorker
from gateway.request.lookup import PrefixHit
from gateway.request.turn import (
    Answer,
    Attempt,
    CacheRef,
    Deliver,
    Escalate,
    Fail,
    Fallback,
    Judge,
    Prefill,
    Purpose,
    Step,
    Transfer,
    Turn,
)
from gateway.settings import Deadlines, HandoffSettings
from gateway.upstream.deadline import Deadline
from gateway.upstream.tier import Tier
from gateway.upstream.worker import Worker
from workers.api.errors import (
    CacheMismatch,
    CacheNotFound,
    CacheUnusable,
    ContextLengthExceeded,
    DeadlineExceeded,
    InvalidRequest,
    KvrelayError,
    Overloaded,
    PrefillCheaper,
)
from workers.api.schemas import Path, WorkerInfo

# Shares of the time left:
WAIT_SHARE = 0.5  # max wait for a circuit; the call itself has the rest
CACHED_SHARE = 0.25  # min time for the first token of an answer from a cache
FULL_PREFILL_SHARE = 0.5  # time for a full prefill's first token, if another tier could answer instead
DOWN_SHARE = 0.5  # max time for a transfer down, of the small model's time
GAP_SHARE = 0.25  # max gap between two tokens of an answer that can be replaced

GAP_INTERVALS = 2  # but never less than this many intervals between a worker's chunks
MAX_INTERVAL_S = 0.25  # between the chunks of an answer that is returned whole
INTERVAL_SHARE = 0.25  # of the longest gap that the settings allow

# A tier's own cache is preferred to a handoff unless it is predicted to take longer than this: it needs no other
# worker, and an exact one needs no mapper.
OWN_CACHE_FACTOR = 1.5
OWN_CACHE_SLACK_S = 0.05


def next_step(turn: Turn) -> Step | Fail:
    """The first step of a turn without attempts; else what follows from the last attempt's result or error."""
    last = turn.last
    if last is None:
        match turn.route.decision.route:
            case "answer":
                return _answer_natively(turn, turn.route.target)
            case "cascade":
                return _ask_small(turn)
            case "escalate":
                return Escalate(turn.route.target)
    if last.error is not None:
        return _after_failure(turn, last, last.error)
    return _after_success(turn, last)


def _after_success(turn: Turn, last: Attempt) -> Step | Fail:
    match last.step:
        case Prefill(deadline=deadline) if turn.escalation is None:
            return _answer_by_small(turn, last.cache, deadline)
        case Prefill():
            return _hand_over(turn, _escalation_tier(turn), last.cache)
        case Transfer(to_small=True, tier=tier):
            return Answer(tier, _small_deadline(turn), None, "shortcut", last.cache, is_judged=True)
        case Transfer(tier=tier, source=source):
            assert last.cache is not None
            return _answer_from(turn, tier, last.cache, source.num_tokens, "fast")
        case Answer(is_judged=True, tier=tier, deadline=deadline) if candidates := _candidates(turn):
            deadline = deadline if turn.escalation is None else _judging_deadline(turn)
            return Judge(tier, candidates[0], deadline, wait_budget(deadline, turn.route.above))
        case Answer(tier=tier):
            return _deliver(turn, tier)
        case Judge(tier=tier):
            return _after_verdict(turn, tier, last)
        case Escalate(tier=tier):
            return _take_over(turn, tier)
        case _:
            raise AssertionError(f"nothing follows {last.step}")


def _after_failure(turn: Turn, last: Attempt, error: KvrelayError) -> Step | Fail:
    step = last.step
    match step:
        # A shortcut: the other fast paths are left.
        case Transfer(to_small=True) | Answer(purpose="shortcut"):
            return _ask_small(turn) if turn.escalation is None else _take_over(turn, step.tier)
        # The small model's cache is gone, though the registry knew it: a miss. The run has dropped the hit by now.
        case Answer(purpose="fast", cache=CacheRef(hit=PrefixHit())) if (
            turn.escalation is None and not turn.route.is_single and isinstance(error, CacheUnusable)
        ):
            return _ask_small(turn)
        # The target's own choice, not a failure.
        case Transfer() if isinstance(error, PrefillCheaper):
            return _prefill_in_full(turn, step.tier)
        case Transfer():
            return _fall_back(turn, step.tier, Fallback(error.code), error)
        # The small model cannot prefill or answer, or its answer broke off while it was judged.
        case Prefill():
            tier = _escalation_tier(turn) if turn.escalation is not None else turn.route.target
            return _fall_back(turn, tier, Fallback(error.code, "small"), error)
        case Judge(tier=tier):
            return _fall_back(turn, turn.route.target, _fallback_for(turn, tier, error), error)
        case Answer(purpose="fast", tier=tier):
            target = tier if turn.escalation is not None or turn.route.is_single else turn.route.target
            return _fall_back(turn, target, _fallback_for(turn, tier, error), error)
        # A full prefill: another worker of the tier, then another tier.
        case Answer(purpose="full_prefill"):
            if isinstance(error, NoUsableWorker):
                return _last_resort(turn, step.tier, _worker_error(turn, step) or error)
            if isinstance(error, DeadlineExceeded):
                return _last_resort(turn, step.tier, error)
            if last.worker is None or error.status < 500:  # a full queue is the tier's, not a worker's
                return _give_up(turn, step.tier, error)
            wait = wait_budget(step.deadline, _others(turn, step.tier))
            return replace(step, avoid=(*step.avoid, last.worker.id), wait=wait)
        # An answer that broke off before any of it was sent.
        case Deliver(tier=tier, can_be_replaced=can_be_replaced):
            if not can_be_replaced or turn.deadline.remaining_s <= 0:
                return Fail(error)
            if not turn.is_small(tier) and _was_prefilled_in_full(turn):
                return _last_resort(turn, turn.route.target, error)
            return _fall_back(turn, turn.route.target, _fallback_for(turn, tier, error), error)
        case _:
            return Fail(error)


# The small model reads and answers


def _ask_small(turn: Turn) -> Step | Fail:
    """From a cache that a tier above can hand down, from its own cache of the whole prompt, or after a prefill."""
    route, deadline = turn.route, _small_deadline(turn)
    if not turn.stores:
        return _answer_by_small(turn, None, deadline)
    was_handed_down = any(isinstance(one.step, Transfer) for one in turn.attempts)
    if not was_handed_down and (transfer := _hand_down(turn, deadline)) is not None:
        return transfer
    if (cache := _whole_small_cache(turn)) is not None:
        return _answer_by_small(turn, cache, deadline)
    return Prefill(route.small, deadline, wait_budget(deadline, route.above))


def _answer_by_small(turn: Turn, cache: CacheRef | None, deadline: Deadline) -> Answer:
    wait = wait_budget(deadline, turn.route.above)
    return Answer(turn.route.small, deadline, wait, "fast", cache, is_judged=True)


def _small_deadline(turn: Turn) -> Deadline:
    """For the small model's prefill, answer and judgement together: set once, by the first of these steps."""
    for attempt in turn.attempts:
        match attempt.step:
            case Transfer(answer_deadline=Deadline() as deadline):
                return deadline
            case Prefill(deadline=deadline) | Answer(deadline=deadline):
                return deadline
    return _judging_deadline(turn)


def _judging_deadline(turn: Turn) -> Deadline:
    """A share of the time left; all of it if no tier above could take over."""
    if not any(tier.is_usable for tier in turn.route.above):
        return turn.deadline
    return turn.deadline.share(turn.settings.deadlines.small_share)


def _whole_small_cache(turn: Turn) -> CacheRef | None:
    """The small model's exact cache of the whole prompt, on a usable worker."""
    small = turn.route.small
    hit = turn.lookups[small.name].whole
    if hit is None or not small.workers[hit.entry.worker].is_usable:
        return None
    return _registered(small, hit)


def _hand_down(turn: Turn, deadline: Deadline) -> Transfer | None:
    """A conversation that moves down: map what a tier above has read into the small model's cache, if that spares it
    enough. A bundle on trial is asked for too: its worker learns from the refusal what to try it out on.

        turns 1-6   large reads and answers          |◄──────── its exact cache ────────►|
        turn 7      small is asked                   |head|◄───── mapped down ─────►|tail|◄─ new ─►|
    """
    small, settings = turn.route.small, turn.settings
    if not turn.may_map or not small.is_usable:
        return None
    worker = small.pick_for_transfer()
    sources = []
    for tier in turn.route.above:
        hit = turn.lookups[tier.name].best(exact_only=True)
        if hit is not None and has_bundle(tier.workers[hit.entry.worker].info, worker.info, or_trial=True):
            sources.append(_registered(tier, hit))
    source = max(sources, key=lambda cache: cache.num_tokens, default=None)
    own = turn.lookups[small.name].best(exact_only=True)
    if source is None:
        return None
    num_tokens = source.num_tokens - settings.handoff.native_tail
    if num_tokens - (own.entry.num_tokens if own else 0) < settings.handoff.min_tokens:
        return None
    # Never longer than the small model's own prefill of the same would take.
    budget_s = max(num_tokens / worker.prefill_tokens_per_s, settings.deadlines.transfer_floor_s)
    budget_s = min(budget_s, DOWN_SHARE * deadline.remaining_s)
    transfer_deadline = Deadline.after(budget_s, turn.deadline.clock).earlier(turn.deadline)
    return Transfer(small, worker, source, num_tokens, transfer_deadline, to_small=True, answer_deadline=deadline)


# The verdict


def _after_verdict(turn: Turn, tier: Tier, last: Attempt) -> Step:
    assert last.verdict is not None
    if last.verdict.accept:
        return _deliver(turn, tier)
    candidates = _candidates(turn)
    wanted = candidates[-1:] if last.verdict.leap else candidates
    usable = [candidate for candidate in wanted if candidate.is_usable]
    if not usable:
        return _deliver(turn, tier, Fallback(NoUsableWorker.code, "large"))
    return Escalate(usable[0], tuple(usable[1:]))


def _candidates(turn: Turn) -> Sequence[Tier]:
    """The tiers that may still take over, next one first."""
    if turn.route.is_single:
        return ()
    escalation = turn.escalation
    if escalation is None:
        return turn.route.above
    assert isinstance(escalation.step, Escalate)
    return escalation.step.rest


def _escalation_tier(turn: Turn) -> Tier:
    assert turn.escalation is not None
    return turn.escalation.step.tier


# An escalation


def _take_over(turn: Turn, tier: Tier) -> Step | Fail:
    """From the tier's own cache, if it leaves little unread; else from the small model's, which may have to prefill
    first."""
    if not turn.may_map:
        return _answer_natively(turn, tier)
    is_early = turn.early is not None and turn.early.tier is tier
    had_shortcut = any(isinstance(one.step, Answer) and one.step.purpose == "shortcut" for one in turn.leg)
    if not is_early and not had_shortcut and (own := _own_cache_at_hand(turn, tier)) is not None:
        num_tokens = own.entry.num_tokens + turn.unread_bytes(own.num_messages)
        return _answer_from(turn, tier, _registered(tier, own), num_tokens, "shortcut")
    cache = turn.small_cache or _whole_small_cache(turn)
    if cache is not None:
        return _hand_over(turn, tier, cache)
    # If this tier cannot answer, only the small model is left: it may take all the time there is.
    share = turn.settings.deadlines.small_share if tier.is_usable else 1.0
    deadline = turn.deadline.share(share)
    return Prefill(turn.route.small, deadline, wait_budget(deadline, turn.route.above))


def _own_cache_at_hand(turn: Turn, tier: Tier) -> PrefixHit | None:
    """A cache of the tier's own that leaves little unread: with it, the tier does not need the small model's."""
    own = turn.lookups[tier.name].best()
    if own is None or own.num_messages < turn.num_stable:
        return None
    return own if turn.unread_bytes(own.num_messages) <= turn.settings.handoff.max_unread_bytes else None


def _hand_over(turn: Turn, tier: Tier, cache: CacheRef | None) -> Step | Fail:
    """Join the early transfer if there is one; else do what costs least."""
    assert cache is not None
    if turn.early is not None and turn.early.tier is tier:
        return replace(turn.early, is_early=True)
    try:
        worker, plan = _plan(turn, tier, cache)
    except KvrelayError as error:
        return _fall_back(turn, tier, Fallback(error.code), error)
    match plan:
        case OwnCache(hit):
            return _answer_from(turn, tier, _registered(tier, hit), cache.num_tokens, "fast")
        case Handoff(num_tokens, budget_s):
            return _transfer(turn, tier, worker, cache, num_tokens, budget_s)
        case FullPrefill(reason, is_failure):
            return _prefill_in_full(turn, tier, Fallback(reason) if is_failure else None)


def early_transfer(turn: Turn, tier: Tier) -> Transfer | None:
    """The transfer that an escalation to this tier would start with, to start it while the answer is still judged."""
    cache = turn.small_cache
    if turn.early is not None or cache is None or not turn.may_map or not tier.is_usable:
        return None
    worker, plan = _plan(turn, tier, cache)
    if not isinstance(plan, Handoff) or _own_cache_at_hand(turn, tier) is not None:
        return None
    return _transfer(turn, tier, worker, cache, plan.num_tokens, plan.budget_s)


def _transfer(turn: Turn, tier: Tier, worker: Worker, source: CacheRef, num_tokens: int, budget_s: float) -> Transfer:
    deadline = Deadline.after(budget_s, turn.deadline.clock).earlier(turn.deadline)
    return Transfer(tier, worker, source, num_tokens, deadline)


def _plan(turn: Turn, tier: Tier, cache: CacheRef) -> tuple[Worker, Plan]:
    """Raises `NoUsableWorker`."""
    own, settings = turn.lookups[tier.name].hits, turn.settings
    worker = tier.pick_for_transfer(preferred=own[0].entry.worker if own else None)
    prefill_rate = worker.prefill_tokens_per_s
    if not worker.has_measured_prefill:  # assume that it is no faster than the smaller model
        prefill_rate = min(prefill_rate, cache.worker.prefill_tokens_per_s)
    rates = TargetRates(prefill_rate, worker.map_tokens_per_s)
    remaining_s = turn.deadline.remaining_s
    return worker, plan_handoff(cache.num_tokens, own, rates, remaining_s, settings.handoff, settings.deadlines)


# The target answers by itself


def _answer_natively(turn: Turn, tier: Tier) -> Step | Fail:
    """From the cache that the client named; else from the tier's exact cache; else by a full prefill."""
    if turn.request.kv_transfer_params is not None:
        named = turn.client_cache
        if named is None or (turn.request.kvrelay.exact and not named.entry.is_exact):
            return _prefill_in_full(turn, tier, Fallback(CacheMismatch.code if named else CacheNotFound.code))
        num_tokens = named.entry.num_tokens + turn.unread_bytes(0)
        return _answer_from(turn, tier, _registered(tier, named), num_tokens, "fast")
    lookup = turn.lookups.get(tier.name)
    own = lookup.best(exact_only=True) if lookup else None
    if own is None:
        return _prefill_in_full(turn, tier)
    num_tokens = own.entry.num_tokens + turn.unread_bytes(own.num_messages)
    return _answer_from(turn, tier, _registered(tier, own), num_tokens, "fast")


def _answer_from(turn: Turn, tier: Tier, cache: CacheRef, max_tokens: int, purpose: Purpose) -> Answer:
    """An answer of this tier from a cache of its own. `max_tokens` bounds the prompt's length.

    Its first token is due early enough for a full prefill afterwards; a cache that is ready gets its share in any case.
    """
    needed_s = max_tokens / cache.worker.prefill_tokens_per_s + turn.settings.deadlines.decode_reserve_s
    deadline = turn.deadline.less(needed_s).later(turn.deadline.share(CACHED_SHARE))
    if _target_can_take_over(turn, tier):
        deadline = deadline.earlier(turn.deadline.share(FULL_PREFILL_SHARE))
    # Another worker of the tier can prefill in full meanwhile. Without one, a full prefill would wait just as long.
    wait = wait_budget(deadline, [tier, *_others(turn, tier)])
    return Answer(tier, deadline, wait, purpose, cache, _is_below_target(turn, tier))


def _prefill_in_full(turn: Turn, tier: Tier, fallback: Fallback | None = None) -> Answer:
    """Leave time for a tier that could answer instead: one above would have to prefill as well; the small model has
    prefilled, and only needs to decode."""
    deadline = turn.deadline
    fair = deadline.share(FULL_PREFILL_SHARE)
    if _target_can_take_over(turn, tier):
        deadline = fair
    elif _small_may_stand_in(turn, tier, fallback):
        deadline = deadline.less(turn.settings.deadlines.decode_reserve_s).later(fair)
    wait = wait_budget(deadline, _others(turn, tier, fallback))
    return Answer(tier, deadline, wait, "full_prefill", None, _is_below_target(turn, tier), fallback=fallback)


def _fall_back(turn: Turn, tier: Tier, fallback: Fallback, error: KvrelayError) -> Step | Fail:
    """A full prefill, in place of the fast path that failed."""
    is_mistake = isinstance(error, InvalidRequest) and not isinstance(error, ContextLengthExceeded)
    if is_mistake and fallback.model == "small":  # the client's: the target would reject it too
        return _give_up(turn, tier, error)
    return _prefill_in_full(turn, tier, fallback)


def _last_resort(turn: Turn, tier: Tier, error: KvrelayError) -> Step | Fail:
    """The target cannot answer in time: the small model does, if the request leaves the choice to the gateway."""
    is_possible = _small_may_stand_in(turn, tier) and turn.deadline.remaining_s > 0
    if not is_possible or isinstance(error, Overloaded):
        return _give_up(turn, tier, error)
    wait = wait_budget(turn.deadline)
    return Answer(turn.route.small, turn.deadline, wait, "last_resort", fallback=Fallback(error.code, "large"))


def _give_up(turn: Turn, tier: Tier, error: KvrelayError) -> Step | Fail:
    """This tier cannot answer: the next one above may, if there is one."""
    rest = _candidates(turn) if turn.escalation is not None and tier is _escalation_tier(turn) else ()
    return Escalate(rest[0], tuple(rest[1:])) if rest else Fail(error)


def _deliver(turn: Turn, tier: Tier, fallback: Fallback | None = None) -> Deliver:
    """A small model's answer that already stands in for another cannot be replaced."""
    can_be_replaced = not turn.route.is_single and not (turn.is_small(tier) and (fallback or turn.fallback))
    return Deliver(tier, can_be_replaced, fallback)


# Conditions


def _is_below_target(turn: Turn, tier: Tier) -> bool:
    """Whether the last tier may still take over, so that this tier's answer is judged."""
    return tier is not turn.route.target


def _target_can_take_over(turn: Turn, tier: Tier) -> bool:
    """The last tier could answer in this one's place."""
    return _is_below_target(turn, tier) and turn.route.target.is_usable


def _small_may_stand_in(turn: Turn, tier: Tier, fallback: Fallback | None = None) -> bool:
    fallback = fallback or turn.fallback
    has_failed = fallback is not None and fallback.model == "small"
    return not (turn.route.is_single or has_failed or _is_below_target(turn, tier))


def _others(turn: Turn, tier: Tier, fallback: Fallback | None = None) -> list[Tier]:
    """The tiers that could answer in this one's place."""
    others = [other for other in turn.route.above if other is not tier] if _is_below_target(turn, tier) else []
    return [*others, turn.route.small] if _small_may_stand_in(turn, tier, fallback) else others


def _fallback_for(turn: Turn, tier: Tier, error: KvrelayError) -> Fallback:
    return Fallback(error.code, "small" if turn.is_small(tier) else "large")


def _was_prefilled_in_full(turn: Turn) -> bool:
    """By the last tier: then only the small model is left."""
    return any(
        isinstance(one.step, Answer) and one.step.purpose == "full_prefill" and one.step.tier is turn.route.target
        for one in turn.attempts
    )


def _worker_error(turn: Turn, step: Answer) -> KvrelayError | None:
    """The error of the worker that failed before this attempt, in the same full prefill."""
    return turn.attempts[-2].error if step.avoid else None


def _registered(tier: Tier, hit: PrefixHit) -> CacheRef:
    entry = hit.entry
    path: Path = "exact" if entry.is_exact else "mapped"
    return CacheRef(tier.workers[entry.worker], entry.cache_id, entry.num_tokens, path, hit)


# Times


def wait_budget(deadline: Deadline, others: Sequence[Tier] = ()) -> Deadline | None:
    """How long to wait for a circuit to admit the call; None if one of the `others` could answer now."""
    return None if any(tier.is_usable for tier in others) else deadline.share(WAIT_SHARE)


def chunk_interval_s(turn: Turn) -> float:
    """Min interval between a worker's chunks: an answer that is returned whole needs few of them."""
    if turn.request.stream:
        return 0.0
    return min(MAX_INTERVAL_S, INTERVAL_SHARE * turn.settings.deadlines.token_gap_s)


def max_gap_s(turn: Turn) -> float:
    """Max gap between tokens before falling back. Not applied during an agreement probe, which prefills in full."""
    if turn.request.kvrelay.agreement_probe:
        return turn.deadline.remaining_s
    share_s = max(GAP_SHARE * turn.deadline.remaining_s, GAP_INTERVALS * chunk_interval_s(turn))
    return min(turn.settings.deadlines.token_gap_s, share_s)


# What a handoff costs
#
#     prompt  |head|----------- handed over, mapped -----------|-- tail --|
#              4 tokens, native                                  64, native


@dataclass(frozen=True)
class TargetRates:
    """The target worker's, in tokens per second."""

    prefill: float
    map: float

    def full_prefill_s(self, num_tokens: int) -> float:
        return num_tokens / self.prefill

    def handoff_s(self, num_tokens: int, num_handed_over: int) -> float:
        """To map what is handed over, then to prefill the rest."""
        return num_handed_over / self.map + (num_tokens - num_handed_over) / self.prefill


@dataclass(frozen=True)
class OwnCache:
    """Answer from a cache that the target holds, exact or mapped, and prefill the rest."""

    hit: PrefixHit


@dataclass(frozen=True)
class Handoff:
    """Hand over the first `num_tokens` of the small model's cache within `budget_s`."""

    num_tokens: int
    budget_s: float


@dataclass(frozen=True)
class FullPrefill:
    """`is_failure`: a handoff was wanted, and there is no time for it."""

    reason: str
    is_failure: bool


Plan = OwnCache | Handoff | FullPrefill


def plan_handoff(
    num_tokens: int,
    own: Sequence[PrefixHit],
    rates: TargetRates,
    remaining_s: float,
    settings: HandoffSettings,
    deadlines: Deadlines,
) -> Plan:
    """What the target answers from. In this order, unless a later one is predicted to be much faster: its exact cache,
    its own mapped cache, a new handoff. `num_tokens` is the prompt's length.

    A handoff gets what is left after a predicted full prefill and a reserve to decode, and never more than a prefill of
    what it hands over would take. Whether it keeps to that is not predicted: a pair whose handoffs are always late
    opens the transfer circuit, which retries by itself.
    """
    num_handed_over = num_tokens - settings.native_tail
    pays = num_handed_over >= max(settings.min_tokens, settings.native_head + 1)
    fastest_s = rates.handoff_s(num_tokens, num_handed_over) if pays else rates.full_prefill_s(num_tokens)
    for hit in sorted(own, key=lambda hit: not hit.entry.is_exact):
        own_s = rates.full_prefill_s(max(0, num_tokens - hit.entry.num_tokens))
        if own_s <= OWN_CACHE_FACTOR * fastest_s + OWN_CACHE_SLACK_S:
            return OwnCache(hit)
    if not pays:
        return FullPrefill("too_short", is_failure=False)
    # Whatever becomes of the handoff, there must be time for a full prefill and some decoding after it.
    spare_s = remaining_s - rates.full_prefill_s(num_tokens) - deadlines.decode_reserve_s
    if spare_s < num_handed_over / rates.map:
        return FullPrefill("no_time", is_failure=True)
    longest_s = max(rates.full_prefill_s(num_handed_over), deadlines.transfer_floor_s)
    return Handoff(num_handed_over, min(spare_s, longest_s))


def has_bundle(source: WorkerInfo | None, target: WorkerInfo | None, *, or_trial: bool = False) -> bool | None:
    """Whether the target reported a mapper from the source's model that it uses, or that is on trial; None if one of
    them has reported nothing yet."""
    if source is None or target is None:
        return None
    pair = (source.fingerprint, target.fingerprint)
    bundles = [one for one in target.bundles if (one.source_fingerprint, one.target_fingerprint) == pair]
    return any(one.usable or (or_trial and one.on_trial) for one in bundles)
