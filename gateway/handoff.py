"""What an escalation does, decided from counts, rates and the time left; `cascade` carries it out.

    prompt  |head|----------- handed over, mapped -----------|-- tail --|
             4 tokens, native                                  64, native
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.settings import Deadlines, HandoffSettings
from gateway.turn import Found
from workers.api.schemas import WorkerInfo

# An own cache is preferred to a handoff as long as it is not predicted to take longer than that, and so much more:
# it needs no other worker, and an exact one needs no mapper.
OWN_CACHE_FACTOR = 1.5
OWN_CACHE_SLACK_S = 0.05


@dataclass(frozen=True)
class Rates:
    """Of the target worker, in tokens per second."""

    prefill: float
    map: float

    def full_prefill_s(self, num_tokens: int) -> float:
        return num_tokens / self.prefill

    def handoff_s(self, num_tokens: int, handed_over: int) -> float:
        """Mapping what is handed over, then reading the rest."""
        return handed_over / self.map + (num_tokens - handed_over) / self.prefill


@dataclass(frozen=True)
class Plan:
    """What the target answers from."""


@dataclass(frozen=True)
class UseOwn(Plan):
    """A cache that it holds, exact or mapped, extended natively."""

    found: Found


@dataclass(frozen=True)
class Transfer(Plan):
    """The first `num_tokens` of the small model's cache, within `budget_s`."""

    num_tokens: int
    budget_s: float


@dataclass(frozen=True)
class Prefill(Plan):
    """Nothing: it reads all itself. `failed` tells that a handoff was wanted and there is no time for it."""

    reason: str
    failed: bool


def has_bundle(source: WorkerInfo | None, target: WorkerInfo | None, *, or_trial: bool = False) -> bool | None:
    """Whether the target told of a mapper from the source's model that it uses, or would try out on the handoffs that
    it refuses; None where one of them has told nothing yet."""
    if source is None or target is None:
        return None
    pair = (source.fingerprint, target.fingerprint)
    between = [one for one in target.bundles if (one.source_fingerprint, one.target_fingerprint) == pair]
    return any(one.usable or (or_trial and one.on_trial) for one in between)


def plan(
    num_tokens: int,
    own: Sequence[Found],
    rates: Rates,
    remaining_s: float,
    settings: HandoffSettings,
    deadlines: Deadlines,
) -> Plan:
    """Preferred in this order, unless a later one is predicted to be much faster: the target's exact cache, its own
    mapped cache, a new handoff. `num_tokens` counts the prompt's, as the small model read them.

    A handoff gets what is left after a predicted full prefill and a reserve to decode, and never more than a prefill
    of what it hands over would take. Whether it keeps to that is not predicted but tried: a pair whose handoffs are
    always late opens the transfer circuit, which tries again by itself.
    """
    handed_over = num_tokens - settings.native_tail
    pays = handed_over >= max(settings.min_tokens, settings.native_head + 1)
    fastest_s = rates.handoff_s(num_tokens, handed_over) if pays else rates.full_prefill_s(num_tokens)
    for found in sorted(own, key=lambda one: not one.entry.is_exact):
        own_s = rates.full_prefill_s(max(0, num_tokens - found.entry.num_tokens))
        if own_s <= OWN_CACHE_FACTOR * fastest_s + OWN_CACHE_SLACK_S:
            return UseOwn(found)
    if not pays:
        return Prefill("too_short", failed=False)
    # Whatever becomes of the handoff, there must be time for a full prefill and some decoding after it.
    spare_s = remaining_s - rates.full_prefill_s(num_tokens) - deadlines.decode_reserve_s
    if spare_s < handed_over / rates.map:
        return Prefill("no_time", failed=True)
    longest_s = max(rates.full_prefill_s(handed_over), deadlines.transfer_floor_s)
    return Transfer(handed_over, min(spare_s, longest_s))
