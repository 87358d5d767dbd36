"""Invalid requests get an error in the OpenAI shape that names the value and what is allowed."""

from __future__ import annotations

import re
from bisect import bisect
from typing import Any

import pytest

from tests.e2e.conftest import AssertRight
from tests.e2e.conversations import conversation
from tests.e2e.running import NUM_TOKENS, Cluster, request
from workers.reference import Reference

CONTEXT = 8192  # of both models
GOOD = [{"role": "user", "content": "Who goes there?"}]
HALF_A_CHARACTER = rb'{"model": "auto", "messages": [{"role": "user", "content": "\ud83d"}]}'

REFUSED: dict[str, tuple[dict[str, Any], int, str, str]] = {
    "unknown model": ({"model": "gpt-17"}, 404, "model", "gpt-17.*known: auto, small, tiny-small"),
    "a model of another type": ({"model": 7}, 400, "model", "string.*7"),
    "no model": ({"model": None}, 400, "model", "required"),
    "no messages": ({"messages": []}, 400, "messages", "at least 1"),
    "messages of another type": ({"messages": "Who?"}, 400, "messages", "list.*Who"),
    "a malformed message": ({"messages": ["Who?"]}, 400, "messages.0", "Who"),
    "an unknown role": ({"messages": [{"role": "king", "content": "I"}]}, 400, "messages.0.role", "system.*king"),
    "content of another type": ({"messages": [{"role": "user", "content": 7}]}, 400, "messages.0.content", "7"),
    "an image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://a/b"}}]}]},
        400,
        "messages.0.content.0.type",
        "text.*image_url",
    ),
    "no answer wanted": ({"max_tokens": 0}, 400, "max_tokens", "greater than or equal to 1.*0"),
    "more than the context": ({"max_tokens": CONTEXT}, 400, "max_tokens", f"context length is {CONTEXT}"),
    "temperature": ({"temperature": 9}, 400, "temperature", "less than or equal to 2.*9"),
    "temperature of another type": ({"temperature": "hot"}, 400, "temperature", "number.*hot"),
    "several answers": ({"n": 2}, 400, "n", "1.*2"),
    "an unknown field": ({"temprature": 0}, 400, "temprature", "known: model"),
    "tools that the model does not support": (
        {"tools": [{"type": "function", "function": {"name": "look"}}]},
        400,
        "tools",
        "does not support tools",
    ),
    "an unknown policy": ({"kvrelay": {"policy": "luck"}}, 400, "kvrelay.policy", "luck.*known: fixed"),
    "an unknown tier": ({"kvrelay": {"max_tier": "huge"}}, 400, "kvrelay.max_tier", "huge.*known: small"),
    "an unknown option": ({"kvrelay": {"exakt": True}}, 400, "kvrelay.exakt", "exakt|extra"),
    "too many stops": ({"stop": [str(i) for i in range(99)]}, 400, "stop", "at most 16"),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(("changes", "status", "param", "says"), REFUSED.values(), ids=REFUSED)
def test_invalid_field_is_rejected(
    cluster: Cluster, changes: dict[str, Any], status: int, param: str, says: str, stream: bool
) -> None:
    reply = cluster.client.post(request(GOOD) | {"stream": stream} | changes)
    assert reply.status == status, reply.body
    assert reply.error["type"] == "invalid_request_error"
    assert reply.error["param"] == param
    assert re.search(says, reply.error["message"]), reply.error
    assert isinstance(reply.error["code"], str)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"7", b"\xff", b"[" * 5000, HALF_A_CHARACTER])
def test_malformed_body_is_rejected(cluster: Cluster, body: bytes) -> None:
    reply = cluster.client.http.post("/v1/chat/completions", content=body)
    assert reply.status_code == 400
    assert reply.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("policy", [None, "always_escalate", "fixed"])
def test_prompt_over_the_context_length_is_rejected(cluster: Cluster, policy: str | None) -> None:
    reply = cluster.client.ask(conversation("Polonius", num_words=9000), policy=policy)
    assert reply.status == 400, reply.body
    assert reply.error["code"] == "context_length_exceeded"
    assert re.search(f"9\\d{{3}} prompt tokens.*{CONTEXT}", reply.error["message"]), reply.error


def test_handoff_up_to_the_last_token_of_the_context(
    cluster: Cluster, reference: Reference, assert_right: AssertRight
) -> None:
    """One token more is rejected."""

    def num_tokens(num_words: int) -> int:
        return len(reference.prompt(conversation("Polonius", num_words=num_words)))

    num_words = bisect(range(9000), CONTEXT - 3, key=num_tokens)
    messages = conversation("Polonius", num_words=num_words - 1)
    room = CONTEXT - len(reference.prompt(messages))
    assert 0 < room <= NUM_TOKENS
    body = request(messages, policy="always_escalate")
    reply = cluster.client.post(body | {"max_tokens": room})
    assert reply.path == "mapped"
    assert_right(reply, messages, room)
    assert cluster.client.post(body | {"max_tokens": room + 1}).error["code"] == "context_length_exceeded"


def test_oversized_body_is_rejected(cluster: Cluster) -> None:
    reply = cluster.client.post(request([{"role": "user", "content": "x" * 5 * 2**20}]))
    assert reply.status == 413
    assert reply.error["code"] == "request_too_large"


def test_rejected_requests_leave_nothing_behind(cluster: Cluster, assert_right: AssertRight) -> None:
    for tier in ("small", "large"):
        assert cluster.worker_metric(tier, "num_requests_running") == 0
    messages = conversation("Osric")
    reply = cluster.client.escalate(messages)
    assert reply.path == "mapped"
    assert_right(reply, messages)
