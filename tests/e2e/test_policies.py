"""Policies that need more than an answer, and text completions, over real models."""

from __future__ import annotations

from typing import Any

from tests.e2e.conftest import AssertRight
from tests.e2e.conversations import conversation
from tests.e2e.running import NUM_TOKENS, Cluster
from workers.api.schemas import DEFAULT_NATIVE_HEAD as HEAD
from workers.api.schemas import DEFAULT_NATIVE_TAIL as TAIL

RULES = {
    "name": "rules",
    "rules": [{"name": "by-keyword", "when": {"keywords": ["Dogberry"]}, "then": {"name": "always_escalate"}}],
    "otherwise": {"name": "confidence", "score": "entropy", "threshold": -50.0, "num_tokens": 4},
}


def test_small_model_verifies_its_own_answer(cluster: Cluster, assert_right: AssertRight) -> None:
    messages = conversation("Feste")
    reply = cluster.client.ask(messages, policy="verifier")
    tier = reply.report["tier"]
    assert (tier == "large") == (reply.report["reason"] in ("doubted", "no_verdict"))
    paths = {"small": ["prefill"], "misfit": ["fallback:no_bundle"], "large": ["mapped", "hybrid", "prefill"]}
    assert reply.path in paths[tier]
    assert reply.report["confidence"] is None or 0 <= reply.report["confidence"] <= 1
    assert_right(reply, messages)


def test_rules_and_entropy(cluster: Cluster, assert_right: AssertRight) -> None:
    with cluster.gateway("rules", policy=RULES) as client:
        messages = conversation("Benedick")
        reply = client.ask(messages)
        assert (reply.report["tier"], reply.report["policy"], reply.report["rule"]) == ("small", "confidence", None)
        assert reply.report["confidence"] < 0, "a negative entropy"
        assert_right(reply, messages)
        messages = conversation("Dogberry")
        reply = client.ask(messages)
        assert (reply.path, reply.report["policy"], reply.report["rule"]) == ("mapped", "always_escalate", "by-keyword")
        assert_right(reply, messages)


def test_text_completion_is_handed_over(cluster: Cluster) -> None:
    text = f"{conversation('Touchstone')[0]['content']} The password of Touchstone is"
    replies = [complete(cluster, text, policy="always_escalate") for _ in range(2)]
    first, second = (one["kvrelay"] for one in replies)
    num_prompt = replies[0]["usage"]["prompt_tokens"]
    assert (first["path"], first["mapped_tokens"]) == ("mapped", num_prompt - TAIL - HEAD)
    texts = {one["choices"][0]["text"] for one in replies}
    assert (second["path"], len(texts)) == ("mapped", 1), "the large model's own cache gives the same answer"
    native = complete(cluster, text, exact=True, policy="always_escalate")
    assert native["kvrelay"]["mapped_tokens"] == 0
    assert len(native["choices"][0]["logprobs"]["tokens"]) <= NUM_TOKENS


def complete(cluster: Cluster, text: str, **options: Any) -> dict[str, Any]:
    body = {"model": "auto", "prompt": text, "max_tokens": NUM_TOKENS, "temperature": 0, "logprobs": 1}
    reply = cluster.client.http.post("/v1/completions", json=body | {"kvrelay": options})
    assert reply.status_code == 200, reply.text
    return dict(reply.json())
