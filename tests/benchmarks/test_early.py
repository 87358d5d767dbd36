from __future__ import annotations

from benchmarks.early import ARMS, Row, main, summary, two_arms
from gateway.policies import TokenLogprob
from gateway.settings import from_values
from tests.gateway.stack import values


def row(arm: str, repeat: int, ttft_ms: float, handoff_ttft_ms: float | None) -> Row:
    tier = "small" if handoff_ttft_ms is None else "large"
    return Row(arm, 512, repeat, tier, "mapped", arm == "early", ttft_ms, handoff_ttft_ms)


def test_added_wait_starts_at_the_end_arms_decision() -> None:
    rows = [row("end", 0, 5000, 1000), row("early", 0, 3900, 700)]
    rows += [row("end", 1, 6000, 1400), row("early", 1, 4700, 800)]
    rows += [row("end", 2, 9000, None), row("early", 2, 1, 1)]  # answered by the small model
    (found,) = summary(rows)
    assert (found["questions"], found["escalated_by_both"], found["decided_at_the_end_ms"]) == (3, 2, 4300)
    assert found["added_wait_ms"] == {"end": 1200, "early": 0}
    assert found["ttft_ms"] == {"end": 5500, "early": 4300}
    assert summary(rows[4:])[0]["added_wait_ms"] == {"end": None, "early": None}


def test_only_the_early_arm_forecasts() -> None:
    settings = from_values(values(**two_arms({arm: arm for arm in ARMS}, -0.02)))
    end, early = (rule.then for rule in settings.chosen_policy.rules)  # type: ignore[attr-defined]
    wavering = [TokenLogprob("a", -0.1)] * 8
    assert (end.forecast(wavering), early.forecast(wavering)) == ("open", "certain")


def test_unknown_family_exits_with_status_2() -> None:
    assert main(["--family", "none"]) == 2
