"""What to make of a request for a handoff, by what it costs. Plain functions from values to a value.

    tokens    |head|◄── mapped before ──►|◄──────── to map ────────►|◄── tail, read natively in any case ──►|
                                         |◄─ map ─►|◄── hybrid: ───►|
                                                     read natively too
    0                                 reused                       end                                  standing

The tail is worth most for quality, so what a handoff may cost beyond the mapping goes into a longer one: as far as
everything still takes no more than a share of a full prefill.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from workers.engines.rates import Costs


@dataclass(frozen=True)
class Ask:
    """Tokens `[head, end)` are to be mapped, those before `reused` are mapped already; the source holds `standing`
    tokens, of which the request will read the rest natively. `share` of a full prefill is what everything may take."""

    head: int
    reused: int
    end: int
    standing: int
    block_tokens: int
    remaining_s: float
    share: float

    def to_map(self, end: int) -> int:
        return max(0, end - max(self.head, self.reused))


@dataclass(frozen=True)
class Decision:
    """Map up to `end`; for `prefill` and `late`, map nothing. `predicted_s` is None where nothing is known yet."""

    kind: Literal["map", "hybrid", "prefill", "late"]
    end: int
    reason: str
    predicted_s: float | None = None
    native_s: float | None = None


def decide(ask: Ask, costs: Costs) -> Decision:
    if not costs.are_known:
        return Decision("map", ask.end, "unmeasured")
    handoff_s, native_s = costs.handoff_s(ask.to_map(ask.end)), costs.prefill_s(0, ask.end)
    if handoff_s >= native_s:
        return Decision("prefill", ask.end, "prefill_cheaper", handoff_s, native_s)
    if handoff_s > ask.remaining_s:
        return Decision("late", ask.end, "no_time", handoff_s, native_s)
    end = _shortest_end(ask, costs)
    if end < ask.end:
        return Decision("hybrid", end, "time_for_a_longer_tail", costs.handoff_s(ask.to_map(end)), native_s)
    return Decision("map", end, "cheapest", handoff_s, native_s)


def _shortest_end(ask: Ask, costs: Costs) -> int:
    """How far to map, so that the rest can be read natively within the share; whole blocks only."""
    allowed_s = ask.share * costs.prefill_s(0, ask.standing)
    end, least = ask.end, max(ask.head + 1, ask.reused)
    for shorter in range((ask.end - 1) // ask.block_tokens * ask.block_tokens, least - 1, -ask.block_tokens):
        if costs.handoff_s(ask.to_map(shorter)) + costs.prefill_s(shorter, ask.standing) > allowed_s:
            break
        end = shorter
    return end
