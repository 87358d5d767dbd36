"""The official `openai` client, against a real server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from tests.gateway.stack import MESSAGES, Stack, live_stack, right_answer
from workers.api.errors import InvalidRequest, Overloaded


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    async with live_stack() as stack:
        yield stack


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def kvrelay_field(reply: Any) -> dict[str, Any]:
    """Return the `kvrelay` field, which the client's types lack."""
    return dict(reply.kvrelay)


async def test_a_chat_completion(client: AsyncOpenAI, stack: Stack) -> None:
    reply = await client.chat.completions.create(model="auto", messages=MESSAGES, logprobs=True)
    choice = reply.choices[0]
    assert choice.message.content == right_answer(stack.small, MESSAGES)
    assert choice.finish_reason == "stop"
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert choice.logprobs.content[0].logprob == -0.125
    assert reply.model == "fake-small"
    assert reply.usage is not None
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + 7
    assert kvrelay_field(reply)["tier"] == "small"


async def test_a_streamed_chat_completion(client: AsyncOpenAI, stack: Stack) -> None:
    stack.small.logprob = -2.0
    stream = await client.chat.completions.create(
        model="auto", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == right_answer(stack.large, MESSAGES)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage is not None
    assert kvrelay_field(chunks[-1])["path"] == "mapped"


async def test_the_kvrelay_field_is_accepted(client: AsyncOpenAI) -> None:
    raw = await client.chat.completions.with_raw_response.create(
        model="auto", messages=MESSAGES, extra_body={"kvrelay": {"policy": "always_escalate"}}
    )
    assert raw.headers["x-kvrelay-path"] == "mapped"
    assert kvrelay_field(raw.parse())["forced"] is True


async def test_a_returned_message_can_be_sent_in_a_follow_up(client: AsyncOpenAI, stack: Stack) -> None:
    extra = {"kvrelay": {"policy": "always_escalate"}}
    first = await client.chat.completions.create(model="auto", messages=MESSAGES, extra_body=extra)
    following = [*MESSAGES, first.choices[0].message, {"role": "user", "content": "And then?"}]
    reply = await client.chat.completions.create(model="auto", messages=following, extra_body=extra)
    assert kvrelay_field(reply)["path"] == "mapped"
    assert len(stack.large.requests("transfer")) == 1, "the cache of the first answer was found"


async def test_models_are_listed_and_retrieved(client: AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["auto", "small", "fake-small", "large", "fake-large"]
    assert (await client.models.retrieve("large")).id == "large"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("gpt-17")


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"model": "gpt-17"}, openai.NotFoundError),
        ({"messages": []}, openai.BadRequestError),
        ({"temperature": 9}, openai.BadRequestError),
    ],
)
async def test_errors_have_the_clients_classes(
    client: AsyncOpenAI, fields: dict[str, Any], error: type[openai.APIError]
) -> None:
    with pytest.raises(error) as raised:
        await client.chat.completions.create(**({"model": "auto", "messages": MESSAGES} | fields))
    assert raised.value.type == "invalid_request_error"
    assert raised.value.code is not None
    assert raised.value.param is not None


async def test_an_overloaded_tier_is_retried_by_the_client(client: AsyncOpenAI, stack: Stack) -> None:
    stack.large.fail("chat", Overloaded("full", retry_after_s=1), times=1)
    retrying = client.with_options(max_retries=1)
    reply = await retrying.chat.completions.create(model="large", messages=MESSAGES)
    assert reply.choices[0].message.content == right_answer(stack.large, MESSAGES)


async def test_an_invalid_request_is_not_retried(client: AsyncOpenAI, stack: Stack) -> None:
    stack.large.fail("chat", InvalidRequest("bad"))
    with pytest.raises(openai.BadRequestError):
        await client.with_options(max_retries=2).chat.completions.create(model="large", messages=MESSAGES)
    assert len(stack.large.requests("chat")) == 1


async def test_a_broken_stream_raises(client: AsyncOpenAI, stack: Stack) -> None:
    stack.large.cut_after = 3
    with pytest.raises(openai.APIError):
        async for _ in await client.chat.completions.create(model="large", messages=MESSAGES, stream=True):
            pass
