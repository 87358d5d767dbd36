from __future__ import annotations

import asyncio
import math
import sys
from typing import Any

import pytest

from gateway.policies import POLICIES, Policy, RequestFeatures, TokenLogprob, build
from gateway.policies.language import _identifier, language_of
from tests.gateway.stack import MESSAGES, SYSTEM, Stack, eventually, in_process, report, right_answer, text

TIERS = ["small", "large"]
ASKED = RequestFeatures(text="Why?", num_chars=4)
SURE = TokenLogprob("Yes", 0.0, (("Yes", 0.0), ("No", -30.0)))
UNSURE = TokenLogprob("No", -9.0, (("Yes", -9.1), ("No", -9.0)))


def tokens(*logprobs: float) -> list[TokenLogprob]:
    """Tokens with these log-probabilities; the rest of the probability is on one other token."""
    return [TokenLogprob("a", one, (("a", one), ("b", math.log(max(1e-9, 1 - math.exp(one)))))) for one in logprobs]


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("tiers", [["small"], ["small", "large"], ["small", "middle", "large"]])
def test_policy_routes_within_the_allowed_tiers(name: str, tiers: list[str]) -> None:
    decision = build({"name": name}).decide(tiers, ASKED)
    assert decision.tier in tiers
    assert decision.policy == build({"name": name}).select(ASKED).policy.name
    assert decision.route in ("answer", "cascade", "escalate")
    if len(tiers) == 1:
        assert decision.route == "answer", "there is no tier to escalate to"


@pytest.mark.parametrize("score", ["mean", "quantile", "margin", "entropy"])
@pytest.mark.parametrize("name", POLICIES)
def test_cascade_policy_judges(name: str, score: str) -> None:
    policy = build({"name": name} | ({"score": score} if name == "confidence" else {})).select(ASKED).policy
    if policy.decide(TIERS, ASKED).route == "cascade":
        assert policy.num_judged_tokens > 0
        assert policy.judge([SURE] * 16).accept
        assert not policy.judge([UNSURE] * 16).accept
        assert not policy.judge([]).accept


@pytest.mark.parametrize("name", ["confidence", "verifier"])
@pytest.mark.parametrize("streaming", ["decide_first", "buffer", "stream_small"])
def test_stream_small_never_escalates_a_stream(name: str, streaming: str) -> None:
    policy = build({"name": name, "streaming": streaming})
    assert policy.decide(TIERS, ASKED).route == "cascade"
    streamed = policy.decide(TIERS, RequestFeatures(is_streamed=True))
    if streaming == "stream_small":
        assert (streamed.route, streamed.tier, streamed.reason) == ("answer", "small", "stream_small")
    else:
        assert streamed.route == "cascade"


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
    verdict = build({"name": "confidence", "threshold": -0.6, "num_tokens": 4}).judge(tokens(*logprobs))
    assert verdict.accept is accept
    assert verdict.confidence == pytest.approx(mean)


@pytest.mark.parametrize(
    ("settings", "logprobs", "expected"),
    [
        ({"score": "quantile", "quantile": 0.25}, [-0.1, -3.0, -0.2, -0.3], -3.0),
        ({"score": "quantile", "quantile": 0.5}, [-0.1, -3.0, -0.2, -0.3], -0.3),
        ({"score": "margin"}, [math.log(0.9), math.log(0.7)], 0.6),
        ({"score": "margin"}, [math.log(0.3)], -0.4),  # another was likelier
        ({"score": "entropy"}, [math.log(0.5)], -math.log(2)),
        ({"score": "mean", "streaming": "buffer", "num_tokens": 1}, [-1.0, -3.0], -2.0),  # buffered: all of it
    ],
)
def test_scores(settings: dict[str, Any], logprobs: list[float], expected: float) -> None:
    verdict = build({"name": "confidence"} | settings).judge(tokens(*logprobs))
    assert verdict.confidence == pytest.approx(expected)


@pytest.mark.parametrize(
    ("probabilities", "at_least"),
    [([0.5], math.log(2)), ([0.01, 0.01], math.log(100)), ([0.25] * 4, math.log(4)), ([1.0], 0)],
)
def test_entropy_is_a_lower_bound(probabilities: list[float], at_least: float) -> None:
    top = tuple((str(place), math.log(one)) for place, one in enumerate(probabilities))
    token = TokenLogprob("a", math.log(probabilities[0]), top)
    judged = build({"name": "confidence", "score": "entropy"}).judge([token])
    assert judged.confidence == pytest.approx(-at_least)


@pytest.mark.parametrize("score", ["margin", "entropy"])
def test_missing_top_logprobs_are_rejected(score: str) -> None:
    verdict = build({"name": "confidence", "score": score}).judge([TokenLogprob("a", 0.0)])
    assert (verdict.accept, verdict.reason, verdict.confidence) == (False, "no_logprobs", None)


@pytest.mark.parametrize(
    ("reply", "accept", "confidence"),
    [
        (TokenLogprob("Yes", math.log(0.6), (("Yes", math.log(0.6)), ("No", math.log(0.2)))), True, 0.75),
        (TokenLogprob(" no", math.log(0.6), ((" no", math.log(0.6)), (" YES", math.log(0.2)))), False, 0.25),
        (TokenLogprob("Well", 0.0, (("Well", 0.0),)), False, None),
    ],
)
def test_verifier_compares_yes_with_no(reply: TokenLogprob, accept: bool, confidence: float | None) -> None:
    verdict = build({"name": "verifier", "threshold": 0.7}).judge([reply, SURE])
    assert verdict.accept is accept
    assert verdict.confidence == (confidence if confidence is None else pytest.approx(confidence))


RULES: dict[str, Any] = {
    "name": "rules",
    "rules": [
        {"name": "long", "when": {"min_chars": 1000}, "then": {"name": "fixed", "tier": "large"}},
        {"name": "words", "when": {"keywords": ["contract", "c++"]}, "then": {"name": "always_escalate"}},
        {"name": "code", "when": {"regex": r"```|Traceback"}, "then": {"name": "fixed", "tier": "large"}},
        {"name": "tools", "when": {"tools": True}, "then": {"name": "fixed", "tier": "large"}},
        {"name": "german", "when": {"language": ["de", "ja"]}, "then": {"name": "fixed", "tier": "large"}},
        {"name": "free", "when": {"tenant_tier": ["free"], "max_chars": 99}, "then": {"name": "fixed"}},
    ],
    "otherwise": {"name": "confidence", "threshold": -0.25},
}


@pytest.mark.parametrize(
    ("request_features", "rule", "route"),
    [
        (RequestFeatures("Hello", 1000), "long", "answer"),
        (RequestFeatures("Read this Contract."), "words", "escalate"),
        (RequestFeatures("How fast is C++?"), "words", "escalate"),
        (RequestFeatures("Subcontractors are many"), None, "cascade"),
        (RequestFeatures("Why this? ```x```"), "code", "answer"),
        (RequestFeatures("Hello", has_tools=True), "tools", "answer"),
        (RequestFeatures("Warum ist der Himmel blau?"), "german", "answer"),
        (RequestFeatures("空はなぜ青いのですか"), "german", "answer"),
        (RequestFeatures("Why is the sky blue?", 20, tenant_tier="free"), "free", "answer"),
        (RequestFeatures("Why is the sky blue?", 100, tenant_tier="free"), None, "cascade"),  # not both
        (RequestFeatures("Why is the sky blue?", 20, tenant_tier="gold"), None, "cascade"),
    ],
)
def test_first_matching_rule_wins(request_features: RequestFeatures, rule: str | None, route: str) -> None:
    policy = build(RULES)
    decision = policy.decide(TIERS, request_features)
    assert (decision.rule, decision.route) == (rule, route)
    selected = policy.select(request_features)
    assert decision.policy == selected.policy.name
    assert selected.decide(TIERS, ASKED) == decision, "the rules are not applied again"


def test_nested_rules() -> None:
    inner = {"name": "rules", "rules": [{"name": "short", "when": {"max_chars": 9}, "then": {"name": "fixed"}}]}
    policy = build({"name": "rules", "rules": [{"name": "all", "when": {}, "then": inner}]})
    assert policy.decide(TIERS, ASKED).rule == "short"
    assert policy.decide(TIERS, RequestFeatures("Hello", 10)).rule == "all"
    assert policy.select(RequestFeatures("Hello", 10)).policy.name == "confidence"


@pytest.mark.parametrize(
    ("written", "language"),
    [
        ("What is the capital of France?", "en"),
        ("Quelle est la capitale de la France ?", "fr"),
        ("¿Cuál es la capital de España?", "es"),
        ("Qual è la capitale della Francia?", "it"),
        ("Wat is de hoofdstad van Nederland?", "nl"),
        ("Столица России?", "ru"),
        ("수도는 어디입니까", "ko"),
        ("首都是哪里", "zh"),
        ("42 + 1", None),
        ("", None),
        ("Bonjour", "fr"),
        ("Danke", "de"),
        ("ok thanks", "en"),
    ],
)
def test_language_detection(written: str, language: str | None) -> None:
    assert language_of(written) == language


def test_language_rule_without_its_extra_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    _identifier.cache_clear()
    monkeypatch.setitem(sys.modules, "py3langid.langid", None)
    rule = {"name": "german", "when": {"language": ["de"]}, "then": {"name": "fixed"}}
    with pytest.raises(ValueError, match=r"policy.rules.0.when.language: requires the extra `language`: pip install"):
        build({"name": "rules", "rules": [rule]})
    assert build({"name": "rules", "rules": [rule | {"when": {}}]}), "other rules need no extra"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "confidense"}, "unknown policy 'confidense'; known: fixed, confidence, verifier, rules, always_"),
        ({}, "unknown policy None; known:"),
        ({"name": "fixed", "treshold": 1}, "policy.treshold: unknown key of policy fixed; known: name, tier"),
        ({"name": "confidence", "threshold": 0.5}, "policy.threshold: .* less than or equal to 0, got 0.5"),
        ({"name": "confidence", "score": "margin", "threshold": 2}, "policy.threshold: .* to -1 .* to 1, got 2"),
        ({"name": "confidence", "score": "median"}, "policy.score: unknown score; known: mean, .*, got 'median'"),
        ({"name": "confidence", "num_tokens": 0}, "policy.num_tokens: .* greater than or equal to 1, got 0"),
        ({"name": "confidence", "streaming": "never"}, "policy.streaming: .*decide_first.*, got 'never'"),
        ({"name": "verifier", "threshold": 2}, "policy.threshold: .* less than or equal to 1, got 2"),
        (
            {"name": "rules", "rules": [{"name": "a", "when": {"regex": "("}, "then": {"name": "fixed"}}]},
            r"policy.rules.0.when.regex: not a valid regular expression: .*, got '\('",
        ),
        (
            {"name": "rules", "rules": [{"name": "a", "when": {"language": ["xx"]}, "then": {"name": "fixed"}}]},
            "policy.rules.0.when.language: unknown language 'xx'; known: en, de",
        ),
        (
            {"name": "rules", "rules": [{"name": "a", "when": {}, "then": {"name": "fixed", "tear": 1}}]},
            "policy.rules.0.then.tear: unknown key of policy fixed",
        ),
        ({"name": "rules", "otherwise": {"name": "best"}}, "policy.otherwise.name: unknown policy 'best'"),
    ],
)
def test_error_names_the_policy_setting(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(settings)


def test_tiers_of_nested_policies_are_checked() -> None:
    policy: Policy = build({"name": "rules", "otherwise": {"name": "fixed", "tier": "huge"}})
    with pytest.raises(ValueError, match="unknown tier 'huge'; known: small, large"):
        policy.check(TIERS)


async def test_gateway_applies_rules() -> None:
    """The prompt is long, and that rule comes first."""
    async with in_process(policy=RULES) as stack:
        reply = await stack.chat()
        assert (report(reply)["rule"], report(reply)["policy"], report(reply)["tier"]) == ("long", "fixed", "large")
        short = report(await stack.chat([{"role": "user", "content": "Why is the sky blue?"}]))
        assert (short["rule"], short["policy"], short["reason"]) == (None, "confidence", "confident")


@pytest.mark.parametrize("score", ["margin", "entropy"])
async def test_score_requests_the_top_logprobs_it_needs(score: str) -> None:
    policy = {"name": "confidence", "score": score, "num_tokens": 3, "threshold": -0.5 if score == "entropy" else 0}
    async with in_process(policy=policy) as stack:
        reply = await stack.chat(logprobs=True, top_logprobs=1)
        assert report(reply)["tier"] == "small"
        assert stack.small.requests("cached_chat")[0]["top_logprobs"] >= 2
        (_, second, *_) = reply.json()["choices"][0]["logprobs"]["content"]
        assert len(second["top_logprobs"]) == 1, "the client gets as many as it requested"
        stack.small.logprob = math.log(0.3)
        assert report(await stack.chat())["tier"] == "large"


@pytest.fixture
def verifier() -> dict[str, Any]:
    return {"name": "verifier", "question": "Right?"}


@pytest.mark.parametrize("reply", ["Yes", "No", "Perhaps"])
async def test_verifier_asks_the_small_model(verifier: dict[str, Any], reply: str) -> None:
    async with in_process(policy=verifier, limits={"max_concurrency_per_tier": 1, "max_queue_per_tier": 0}) as stack:
        stack.small.canned_answers = {"Right?": reply}
        answer = await stack.chat()
        answering = stack.small if reply == "Yes" else stack.large
        assert text(answer) == right_answer(answering, MESSAGES)
        call = stack.small.requests("cached_chat")[-1]
        assert call["messages"][-2]["content"] == right_answer(stack.small, MESSAGES)
        assert (call["max_tokens"], call["kv_transfer_params"]["store"]) == (1, False)
        assert stack.metric("num_requests_running", tier="small") == 0


async def test_follow_up_holds_no_slot_during_the_escalation(verifier: dict[str, Any]) -> None:
    async with in_process(policy=verifier) as stack:
        stack.small.canned_answers = {"Right?": "No"}
        stack.large.delay("cached_chat", 0.5)
        asking = asyncio.create_task(stack.chat())
        await eventually(lambda: bool(stack.large.requests("cached_chat")))
        assert stack.metric("num_requests_running", tier="small") == 0
        assert report(await asking)["tier"] == "large"


async def test_failed_verifier_is_not_a_client_error(stack: Stack, verifier: dict[str, Any]) -> None:
    async with in_process(policy=verifier) as stack:
        stack.small.canned_answers = {"Right?": ""}
        reply = await stack.chat([SYSTEM, {"role": "user", "content": "Anything?"}])
        assert report(reply)["tier"] == "large"
