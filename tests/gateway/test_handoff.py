"""What an escalation does, as a function of counts, rates and time."""

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


def own(num_tokens: int, provenance: str = "exact") -> PrefixHit:
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


def planned(num_tokens: int, *found: PrefixHit, remaining_s: float = 120.0, rates: TargetRates = RATES) -> Plan:
    return plan_handoff(num_tokens, found, rates, remaining_s, HANDOFF, DEADLINES)


def handoff(num_tokens: int, deadline_s: float) -> Handoff:
    about: Any = pytest.approx(deadline_s)
    return Handoff(num_tokens, about)


def test_all_but_the_native_tail_is_handed_over() -> None:
    assert planned(2048) == Handoff(2048 - 64, 1.984)


def test_never_longer_than_a_prefill_of_what_is_handed_over() -> None:
    assert planned(1064) == handoff(1000, 1.0)


def test_a_full_prefill_and_a_reserve_are_kept_back() -> None:
    assert planned(1064, remaining_s=6.5) == handoff(1000, 6.5 - 1.064 - 5.0)


@pytest.mark.parametrize("remaining_s", [6.1, 3.0, 0.0])
def test_without_time_for_both_it_is_not_tried(remaining_s: float) -> None:
    assert planned(1064, remaining_s=remaining_s) == FullPrefill("no_time", is_failure=True)


@pytest.mark.parametrize("num_tokens", [1, 64, 191])
def test_too_short_to_pay(num_tokens: int) -> None:
    assert planned(num_tokens) == FullPrefill("too_short", is_failure=False)
    assert isinstance(planned(192), Handoff)


def test_the_exact_cache_comes_first() -> None:
    exact, mapped = own(1950), own(1990, "mapped:b")
    assert planned(2000, mapped, exact) == OwnCache(exact)


def test_then_the_own_mapped_cache() -> None:
    mapped = own(1900, "mapped:b")
    assert planned(2000, mapped) == OwnCache(mapped)


def test_an_exact_cache_of_little_does_not_stand_in_the_way() -> None:
    little, mapped = own(20), own(1900, "mapped:b")
    assert planned(2000, little) == handoff(1936, 1.936)
    assert planned(2000, little, mapped) == OwnCache(mapped)


def test_any_own_cache_beats_a_prefill_of_the_same() -> None:
    assert planned(150, own(10)) == OwnCache(own(10))


def test_models_so_small_that_calls_cost_more_than_reading_get_a_floor() -> None:
    quick = TargetRates(prefill=100_000.0, map=1_000_000.0)
    floored = plan_handoff(512, (), quick, 60.0, HANDOFF, Deadlines(transfer_floor_s=0.5))
    assert floored == Handoff(448, 0.5)
