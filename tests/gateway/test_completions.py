"""`/v1/completions`: text prompts through the same cascade."""

from __future__ import annotations

import re
from typing import Any

import httpx
import openai
import pytest

from tests.gateway.stack import LONG, Stack, live_stack, report
from tools.fake_worker import FakeWorker
from workers.api.errors import TransferFailed
from workers.api.schemas import Message

PROMPT = f"Know this: {LONG}. What comes after word41?"


async def complete(stack: Stack, prompt: Any = PROMPT, **fields: Any) -> httpx.Response:
    return await stack.http.post("/v1/completions", json={"model": "auto", "prompt": prompt} | fields)


def right_text(worker: FakeWorker) -> str:
    return worker.answer_to([Message(role="user", content=PROMPT)])


def text(reply: httpx.Response) -> str:
    assert reply.status_code == 200, reply.text
    return str(reply.json()["choices"][0]["text"])


async def test_a_completion_has_openais_format(stack: Stack) -> None:
    reply = await complete(stack)
    assert text(reply) == right_text(stack.small)
    body = reply.json()
    assert body["object"] == "text_completion" and body["id"].startswith("cmpl-")
    assert body["choices"][0]["logprobs"] is None and body["choices"][0]["finish_reason"] == "stop"
    assert stack.small.requests("prefill")[0]["prefix"] == PROMPT
    assert stack.small.requests("cached_complete")[0]["max_tokens"] == 16, "OpenAI's default"


async def test_an_unsure_completion_is_handed_over(stack: Stack) -> None:
    stack.small.logprob = -2.0
    reply = await complete(stack)
    assert (text(reply), report(reply)["path"]) == (right_text(stack.large), "mapped")
    assert len(stack.large.requests("cached_complete")) == 1


async def test_a_failed_transfer_falls_back(stack: Stack) -> None:
    stack.large.fail("transfer", TransferFailed("gone"))
    reply = await complete(stack, kvrelay={"policy": "always_escalate"})
    assert (text(reply), report(reply)["path"]) == (right_text(stack.large), "fallback:transfer_failed")


async def test_a_text_prompt_is_cached_apart_from_a_chat_of_the_same_words(stack: Stack) -> None:
    await complete(stack)
    assert report(await complete(stack))["path"] == "exact"
    chat = await stack.chat([{"role": "user", "content": PROMPT}])
    assert report(chat)["path"] == "prefill"


async def test_logprobs_have_the_completions_format(stack: Stack) -> None:
    logprobs = (await complete(stack, logprobs=2)).json()["choices"][0]["logprobs"]
    words = [word if index == 0 else f" {word}" for index, word in enumerate(right_text(stack.small).split(" "))]
    assert logprobs["tokens"] == words
    assert logprobs["token_logprobs"] == [-0.125] * len(words)
    assert logprobs["text_offset"] == [len("".join(words[:index])) for index in range(len(words))]
    assert set(logprobs["top_logprobs"][0]) == {words[0], "~"}


async def test_the_official_client_streams_a_completion() -> None:
    async with live_stack(policy={"name": "verifier", "question": "Right?"}) as stack:
        stack.small.canned_answers = {"Right?": "Yes"}
        async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none") as client:
            chunks = [
                chunk
                async for chunk in await client.completions.create(
                    model="auto", prompt=PROMPT, stream=True, logprobs=0, stream_options={"include_usage": True}
                )
            ]
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(choice.text for choice in choices) == right_text(stack.small)
    offsets = [offset for choice in choices if choice.logprobs for offset in choice.logprobs.text_offset or ()]
    assert offsets == sorted(offsets) and offsets[1] == len(choices[1].text)
    usage = chunks[-1].usage
    assert usage is not None and usage.completion_tokens == 7
    assert stack.small.requests("chat")[0]["messages"][0]["content"] == PROMPT, "the verifier sends a chat"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": ""}, "prompt: String should have at least 1 character; got ''"),
        ({"prompt": ["a", "b"]}, r"prompt: Input should be a valid string; got \['a', 'b'\]"),
        ({"prompt": [1, 2]}, "prompt: Input should be a valid string"),
        ({"echo": True}, "echo: Input should be False; got True"),
        ({"best_of": 3}, "best_of: Input should be 1; got 3"),
        ({"messages": []}, "unknown field 'messages'; known: model, temperature"),
    ],
)
async def test_invalid_fields_are_named(stack: Stack, fields: dict[str, Any], message: str) -> None:
    reply = await complete(stack, **fields)
    assert reply.status_code == 400
    assert re.search(message, reply.json()["error"]["message"]), reply.text


async def test_a_list_of_one_prompt_is_accepted(stack: Stack) -> None:
    assert text(await complete(stack, [PROMPT])) == right_text(stack.small)
