"""`plan_handoff`: the plan of an escalation from token counts, rates and remaining time."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.request.lookup import PrefixHit
from gateway.request.steps import FullPrefill, Handoff, OwnCache, Plan, TargetRates, plan_handoff
from gateway.settings import Deadlines, HandoffSettings
from gateway.state.registry import Entry

RATES = TargetRates(prefill=1000.0, map=20_000.0)
HANDOFF = HandoffSettings()
DEADLINES = Deadlines(decode_reserve_s=5.0)


def hit(num_tokens: int, provenance: str = "exact") -> PrefixHit:
    entry = Entry(
        cache_id="kvc-" + "0" * 32,
        worker="large-0",
        epoch="e",
        tenant="default",
        num_tokens=num_tokens,
        provenance=provenance,
        expires_at=1e12,
    )
    return PrefixHit("key", 1, entry)


def plan(num_tokens: int, *hits: PrefixHit, remaining_s: float = 120.0, rates: TargetRates = RATES) -> Plan:
    return plan_handoff(num_tokens, hits, rates, remaining_s, HANDOFF, DEADLINES)


def handoff(num_tokens: int, deadline_s: float) -> Handoff:
    close_to: Any = pytest.approx(deadline_s)
    return Handoff(num_tokens, close_to)


def test_all_but_the_native_tail_is_handed_over() -> None:
    assert plan(2048) == Handoff(2048 - 64, 1.984)


def test_the_deadline_is_at_most_a_prefill_of_the_handed_over_tokens() -> None:
    assert plan(1064) == handoff(1000, 1.0)


def test_time_for_a_full_prefill_and_the_reserve_is_kept() -> None:
    assert plan(1064, remaining_s=6.5) == handoff(1000, 6.5 - 1.064 - 5.0)


@pytest.mark.parametrize("remaining_s", [6.1, 3.0, 0.0])
def test_without_time_for_handoff_and_prefill_the_plan_is_a_full_prefill(remaining_s: float) -> None:
    assert plan(1064, remaining_s=remaining_s) == FullPrefill("no_time", is_failure=True)


@pytest.mark.parametrize("num_tokens", [1, 64, 191])
def test_a_short_prompt_is_not_handed_over(num_tokens: int) -> None:
    assert plan(num_tokens) == FullPrefill("too_short", is_failure=False)
    assert isinstance(plan(192), Handoff)


def test_an_exact_cache_is_preferred() -> None:
    exact, mapped = hit(1950), hit(1990, "mapped:b")
    assert plan(2000, mapped, exact) == OwnCache(exact)


def test_a_mapped_cache_of_the_target_is_used() -> None:
    mapped = hit(1900, "mapped:b")
    assert plan(2000, mapped) == OwnCache(mapped)


def test_a_short_exact_cache_is_not_preferred() -> None:
    short, mapped = hit(20), hit(1900, "mapped:b")
    assert plan(2000, short) == handoff(1936, 1.936)
    assert plan(2000, short, mapped) == OwnCache(mapped)


def test_any_cache_of_the_target_beats_a_full_prefill() -> None:
    assert plan(150, hit(10)) == OwnCache(hit(10))


def test_a_fast_model_gets_a_minimum_deadline() -> None:
    quick = TargetRates(prefill=100_000.0, map=1_000_000.0)
    floored = plan_handoff(512, (), quick, 60.0, HANDOFF, Deadlines(transfer_floor_s=0.5))
    assert floored == Handoff(448, 0.5)
