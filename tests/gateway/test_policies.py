from __future__ import annotations

import math

import pytest

from gateway.policies import POLICIES, build

TIERS = ["small", "large"]


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("tiers", [["small"], ["small", "large"], ["small", "middle", "large"]])
def test_every_policy_routes_within_the_allowed_tiers(name: str, tiers: list[str]) -> None:
    decision = build({"name": name}).decide(tiers)
    assert decision.tier in tiers
    assert decision.policy == name
    assert decision.route in ("answer", "cascade", "escalate")
    if len(tiers) == 1:
        assert decision.route == "answer", "there is nobody to escalate to"


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_that_cascades_judges(name: str) -> None:
    policy = build({"name": name})
    if policy.decide(TIERS).route == "cascade":
        assert policy.num_judged_tokens > 0
        assert policy.judge([0.0] * policy.num_judged_tokens).accept
        assert not policy.judge([-9.0] * policy.num_judged_tokens).accept


@pytest.mark.parametrize(
    ("logprobs", "accept", "mean"),
    [
        ([-0.5, -0.7], True, -0.6),  # at the threshold
        ([-0.5, -0.71], False, -0.605),
        ([math.log(0.9)] * 4, True, math.log(0.9)),
        ([-0.1, -0.1, -0.1, -0.1, -99.0], True, -0.1),  # only the first four are judged
        ([-0.1], True, -0.1),  # a short answer is judged whole
    ],
)
def test_confidence_is_the_mean_over_the_first_tokens(logprobs: list[float], accept: bool, mean: float) -> None:
    verdict = build({"name": "confidence", "threshold": -0.6, "num_tokens": 4}).judge(logprobs)
    assert verdict.accept is accept
    assert verdict.confidence == pytest.approx(mean)


def test_without_logprobs_nothing_is_trusted() -> None:
    verdict = build({"name": "confidence"}).judge([])
    assert (verdict.accept, verdict.reason, verdict.confidence) == (False, "no_logprobs", None)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "confidense"}, "unknown policy 'confidense'; known: fixed, confidence, always_escalate"),
        ({}, "unknown policy None; known:"),
        ({"name": "fixed", "treshold": 1}, "policy.treshold: unknown key of policy fixed; known: name, tier"),
        ({"name": "confidence", "threshold": 0.5}, "policy.threshold: .* less than or equal to 0, got 0.5"),
        ({"name": "confidence", "num_tokens": 0}, "policy.num_tokens: .* greater than or equal to 1, got 0"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(settings)
