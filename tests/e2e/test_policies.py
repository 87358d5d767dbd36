"""Policies that ask more of a worker than an answer, and texts in place of conversations, over real models."""

from __future__ import annotations

from typing import Any

from tests.e2e.conftest import Right
from tests.e2e.running import NUM_TOKENS, Cluster
from tests.e2e.talks import talk
from workers.api.schemas import DEFAULT_NATIVE_HEAD as HEAD
from workers.api.schemas import DEFAULT_NATIVE_TAIL as TAIL

RULES = {
    "name": "rules",
    "rules": [{"name": "asked-for", "when": {"keywords": ["Dogberry"]}, "then": {"name": "always_escalate"}}],
    "otherwise": {"name": "confidence", "score": "entropy", "threshold": -50.0, "num_tokens": 4},
}


def test_the_small_model_judges_its_own_answer(cluster: Cluster, right: Right) -> None:
    asked = talk("Feste")
    reply = cluster.client.ask(asked, policy="verifier")
    tier = reply.told["tier"]
    assert (tier == "large") == (reply.told["reason"] in ("doubted", "no_verdict"))
    paths = {"small": ["prefill"], "misfit": ["fallback:no_bundle"], "large": ["mapped", "hybrid", "prefill"]}
    assert reply.path in paths[tier]
    assert reply.told["confidence"] is None or 0 <= reply.told["confidence"] <= 1
    right(reply, asked)


def test_rules_and_the_likeliest_tokens(cluster: Cluster, right: Right) -> None:
    with cluster.gateway("rules", policy=RULES) as client:
        asked = talk("Benedick")
        reply = client.ask(asked)
        assert (reply.told["tier"], reply.told["policy"], reply.told["rule"]) == ("small", "confidence", None)
        assert reply.told["confidence"] < 0, "minus an entropy"
        right(reply, asked)
        asked = talk("Dogberry")
        reply = client.ask(asked)
        assert (reply.path, reply.told["policy"], reply.told["rule"]) == ("mapped", "always_escalate", "asked-for")
        right(reply, asked)


def test_a_text_is_handed_over_as_a_conversation_is(cluster: Cluster) -> None:
    text = f"{talk('Touchstone')[0]['content']} The password of Touchstone is"
    told = [complete(cluster, text, policy="always_escalate") for _ in range(2)]
    first, second = (one["kvrelay"] for one in told)
    num_prompt = told[0]["usage"]["prompt_tokens"]
    assert (first["path"], first["mapped_tokens"]) == ("mapped", num_prompt - TAIL - HEAD)
    texts = {one["choices"][0]["text"] for one in told}
    assert (second["path"], len(texts)) == ("mapped", 1), "from the large model's own cache it is the same"
    native = complete(cluster, text, exact=True, policy="always_escalate")
    assert native["kvrelay"]["mapped_tokens"] == 0
    assert len(native["choices"][0]["logprobs"]["tokens"]) <= NUM_TOKENS


def complete(cluster: Cluster, text: str, **options: Any) -> dict[str, Any]:
    body = {"model": "auto", "prompt": text, "max_tokens": NUM_TOKENS, "temperature": 0, "logprobs": 1}
    reply = cluster.client.http.post("/v1/completions", json=body | {"kvrelay": options})
    assert reply.status_code == 200, reply.text
    return dict(reply.json())
