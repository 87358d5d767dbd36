"""The official `openai` client against real models, streaming and not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.e2e.conversations import Messages, conversation, next_turn
from tests.e2e.running import NUM_TOKENS, Cluster
from workers.api.schemas import DEFAULT_NATIVE_HEAD as HEAD
from workers.api.schemas import DEFAULT_NATIVE_TAIL as TAIL
from workers.reference import Reference


@pytest.fixture(scope="module")
def client(cluster: Cluster) -> Iterator[OpenAI]:
    plain = openai.DefaultHttpxClient(trust_env=False)
    with OpenAI(base_url=f"{cluster.client.url}/v1", api_key="none", max_retries=0, http_client=plain) as client:
        yield client


def ask(client: OpenAI, messages: Messages, **changes: Any) -> Any:
    fields: dict[str, Any] = {"model": "auto", "max_tokens": NUM_TOKENS, "temperature": 0, "logprobs": True}
    return client.chat.completions.create(**fields | {"messages": messages} | changes)


def escalated(options: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"extra_body": {"kvrelay": {"policy": "always_escalate"} | (options or {})}}


def test_completion(client: OpenAI, reference: Reference) -> None:
    messages = conversation("Antonio")
    reply = ask(client, messages, model="large")
    reference.check(reply.model_dump(), reference.native("large", messages, NUM_TOKENS))
    num_prompt = len(reference.prompt(messages))
    assert (reply.object, reply.model) == ("chat.completion", "tiny-large")
    assert reply.usage.prompt_tokens == num_prompt
    assert reply.usage.completion_tokens == len(reply.choices[0].logprobs.content)
    assert reply.usage.total_tokens == num_prompt + reply.usage.completion_tokens
    assert reply.usage.prompt_tokens_details.cached_tokens == 0
    assert (reply.kvrelay["tier"], reply.kvrelay["path"], reply.kvrelay["forced"]) == ("large", "prefill", True)
    again = ask(client, messages, model="tiny-large")
    assert 0 < again.usage.prompt_tokens_details.cached_tokens < num_prompt
    assert again.kvrelay["path"] == "exact"


def test_stream(client: OpenAI, reference: Reference) -> None:
    messages = conversation("Bassanio")
    stream = ask(client, messages, stream=True, stream_options={"include_usage": True}, **escalated())
    chunks = list(stream)
    tokens = [one for chunk in chunks for choice in chunk.choices if choice.logprobs for one in choice.logprobs.content]
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    choice = {"logprobs": {"content": [one.model_dump() for one in tokens]}, "message": {"content": text}}
    last = chunks[-1]
    num_handoff = len(reference.prompt(messages)) - TAIL
    assert (last.kvrelay["path"], last.kvrelay["mapped_tokens"]) == ("mapped", num_handoff - HEAD)
    reference.check({"choices": [choice]}, reference.handed_over(messages, num_handoff - HEAD, NUM_TOKENS))
    assert last.choices == [] and last.usage.prompt_tokens == len(reference.prompt(messages))
    assert last.usage.prompt_tokens_details.cached_tokens == 0, "mapped tokens are not cache hits"
    (reason,) = (choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason)
    assert reason == ("length" if len(tokens) == NUM_TOKENS else "stop")


def test_streamed_and_whole_answers_are_the_same(client: OpenAI) -> None:
    messages = conversation("Gonzalo")
    whole = ask(client, messages, **escalated())
    streamed = "".join(
        choice.delta.content or ""
        for chunk in ask(client, messages, stream=True, **escalated())
        for choice in chunk.choices
    )
    assert streamed == whole.choices[0].message.content


def test_reply_message_can_be_sent_back_in_the_next_turn(client: OpenAI) -> None:
    messages = conversation("Trinculo")
    first = ask(client, messages, **escalated())
    after = next_turn(messages, "", "And then?")
    after[-2] = first.choices[0].message
    second = ask(client, after, **escalated({"agreement_probe": 8}))
    assert (second.kvrelay["path"], second.kvrelay["handoff_tokens"]) == ("mapped", None)
    assert 0 <= second.kvrelay["top1_agreement"] <= 1
    assert second.kvrelay["full_prefill_ms"] > 0


def test_headers(client: OpenAI) -> None:
    messages: Any = conversation("Stephano")
    raw = client.chat.completions.with_raw_response.create(
        model="auto", messages=messages, max_tokens=2, extra_headers={"x-request-id": "mine.1"}, **escalated()
    )
    assert raw.headers["x-request-id"] == "mine.1"
    assert (raw.headers["x-kvrelay-path"], raw.headers["x-kvrelay-model"]) == ("mapped", "tiny-large")
    assert float(raw.headers["x-kvrelay-overhead-ms"]) >= 0


def test_models(client: OpenAI) -> None:
    known = {model.id for model in client.models.list()}
    assert {"auto", "small", "large", "tiny-small", "tiny-large"} <= known
    with pytest.raises(openai.NotFoundError, match="gpt-17.*known: auto"):
        client.models.retrieve("gpt-17")
