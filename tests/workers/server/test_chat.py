"""Answers match transformers' greedy search, in the shapes of the OpenAI API."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.workers.engines.tiny import CONTEXT, greedy
from tests.workers.server.support import SALT, TALK, ServedWorker, chat_request, content
from workers.api.schemas import Message
from workers.engines.base import Token
from workers.routes.completions import spaced
from workers.serving.generation import GenerationChunk

NUM = 12


def native_answer(served: ServedWorker, reference: LlamaForCausalLM, num_tokens: int = NUM) -> list[int]:
    """The tokens of greedy search after `TALK`."""
    return greedy(reference, served.prompt(), num_tokens)


async def chunks(served: ServedWorker, **changes: Any) -> list[dict[str, Any]]:
    request = chat_request(stream=True, **changes)
    return [chunk async for chunks in served.client.chat_stream(request, timeout_s=60) for chunk in chunks]


def text_of(parts: list[dict[str, Any]]) -> str:
    return "".join(choice["delta"].get("content", "") for part in parts for choice in part["choices"])


async def test_answer_matches_greedy_search(served: ServedWorker, reference: LlamaForCausalLM) -> None:
    reply = await served.chat(max_tokens=NUM)
    assert content(reply) == served.text(native_answer(served, reference))
    assert reply["choices"][0]["finish_reason"] == "length"
    num_prompt = len(served.prompt())
    assert reply["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": NUM,
        "total_tokens": num_prompt + NUM,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert reply["kv_transfer_params"]["path"] == "prefill"
    assert reply["model"] == served.worker.engine.model.name and reply["object"] == "chat.completion"


async def test_stream_matches_whole_answer(served: ServedWorker) -> None:
    whole = await served.chat(max_tokens=NUM, reuse=False)
    parts = await chunks(served, max_tokens=NUM, reuse=False)
    assert text_of(parts) == content(whole)
    assert parts[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [part["choices"][0]["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + ["length"]
    early, late = parts[0]["kv_transfer_params"], parts[-1]["kv_transfer_params"]
    assert (early["path"], early["cache_id"]) == ("prefill", None) and late["cache_id"]
    assert not any("usage" in part for part in parts)
    assert len({part["id"] for part in parts}) == 1


async def test_long_stream_interval_sends_two_chunks(served: ServedWorker) -> None:
    whole = await served.chat(max_tokens=NUM, reuse=False, logprobs=True)
    options = {"include_usage": True, "interval_ms": 60_000.0}
    parts = await chunks(served, max_tokens=NUM, reuse=False, logprobs=True, stream_options=options)
    choices = [choice for part in parts for choice in part["choices"]]
    assert text_of(parts) == content(whole) and parts[-1]["usage"] == whole["usage"]
    assert sum(bool(choice["delta"].get("content")) for choice in choices) == 2
    logprobs = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    assert len(logprobs) == NUM and choices[-1]["finish_reason"] == "length"


async def test_spaced_sends_first_chunk_at_once_and_rest_at_intervals() -> None:
    now = 0.0

    async def generated() -> AsyncIterator[GenerationChunk]:
        nonlocal now
        for number in range(6):
            yield GenerationChunk(str(number), (Token(number, -0.5, ()),))
            now += 1.0

    pieces = [piece async for piece in spaced(generated(), 2.0, clock=lambda: now)]
    assert [piece.text for piece in pieces] == ["0", "12", "34", "5"]
    assert [[token.id for token in piece.tokens] for piece in pieces] == [[0], [1, 2], [3, 4], [5]]


async def test_requested_usage_is_the_last_chunk(served: ServedWorker) -> None:
    parts = await chunks(served, stream_options={"include_usage": True})
    assert parts[-1]["choices"] == [] and parts[-1]["usage"]["completion_tokens"] == 8
    assert parts[-1]["kv_transfer_params"]["cache_id"] and "kv_transfer_params" not in parts[-2]


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_cover_every_token(served: ServedWorker, reference: LlamaForCausalLM, stream: bool) -> None:
    tokens = native_answer(served, reference)
    logits = reference(torch.tensor([served.prompt() + tokens])).logits[0, -len(tokens) - 1 : -1]
    logprobs = logits.log_softmax(-1)
    if stream:
        parts = await chunks(served, max_tokens=NUM, logprobs=True, top_logprobs=2)
        entries = [e for p in parts if p["choices"][0]["logprobs"] for e in p["choices"][0]["logprobs"]["content"]]
    else:
        reply = await served.chat(max_tokens=NUM, logprobs=True, top_logprobs=2)
        entries = reply["choices"][0]["logprobs"]["content"]
    expected = [float(row[token]) for row, token in zip(logprobs, tokens, strict=True)]
    assert [entry["logprob"] for entry in entries] == pytest.approx(expected, abs=1e-4)
    assert [entry["top_logprobs"][0]["logprob"] for entry in entries] == pytest.approx(expected, abs=1e-4)
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)
    assert all(bytes(entry["bytes"]).decode() == entry["token"] for entry in entries)


async def test_logprobs_are_absent_by_default(served: ServedWorker) -> None:
    assert (await served.chat())["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_string_ends_the_answer_and_is_omitted(served: ServedWorker, stream: bool) -> None:
    whole = content(await served.chat(max_tokens=40))
    stop = whole[10:14]
    expected = whole[: whole.index(stop)]
    if stream:
        parts = await chunks(served, max_tokens=40, stop=["never generated", stop])
        text, reason = text_of(parts), parts[-1]["choices"][0]["finish_reason"]
    else:
        reply = await served.chat(max_tokens=40, stop=stop)
        text, reason = content(reply), reply["choices"][0]["finish_reason"]
        assert reply["usage"]["completion_tokens"] < 40
    assert (text, reason) == (expected, "stop")


async def test_eos_token_ends_the_answer(served: ServedWorker, reference: LlamaForCausalLM) -> None:
    tokens = native_answer(served, reference, 6)
    object.__setattr__(served.worker.engine.model, "eos_ids", frozenset({tokens[4]}))
    reply = await served.chat(max_tokens=40)
    assert content(reply) == served.text(tokens[:4])
    assert reply["choices"][0]["finish_reason"] == "stop"
    assert reply["usage"]["completion_tokens"] == 5


async def test_answer_without_max_tokens_fills_the_context(served: ServedWorker) -> None:
    words = "fox " * 400
    prompt = [Message(role="user", content=words)]
    object.__setattr__(served.worker.engine.model, "eos_ids", frozenset())
    reply = await served.chat(prompt, max_tokens=None)
    assert reply["usage"]["total_tokens"] == CONTEXT
    assert reply["choices"][0]["finish_reason"] == "length"


async def test_seed_repeats_a_sample(served: ServedWorker) -> None:
    async def draw(seed: int) -> str:
        return content(await served.chat(temperature=1.3, seed=seed, max_tokens=NUM))

    assert await draw(5) == await draw(5) != await draw(6)


async def test_greedy_answers_do_not_depend_on_batching(served: ServedWorker) -> None:
    talks = [[*TALK, Message(role="assistant", content="dog " * n), TALK[1]] for n in (1, 50, 150)]
    alone = [content(await served.chat(talk, reuse=False, store=False)) for talk in talks]
    noise = [served.chat(talk, temperature=1.0, priority=n) for n, talk in enumerate(talks)]
    together = await asyncio.gather(*(served.chat(talk, reuse=False) for talk in talks), *noise)
    assert [content(reply) for reply in together[: len(talks)]] == alone


@pytest.mark.parametrize("as_tokens", [False, True])
async def test_completions_match_greedy_search(
    served: ServedWorker, reference: LlamaForCausalLM, as_tokens: bool
) -> None:
    text = "The quick brown fox"
    ids = served.worker.engine.tokenizer.encode(text).token_ids
    prompt = ids if as_tokens else text
    body = {"prompt": prompt, "temperature": 0, "max_tokens": NUM, "tenant_salt": SALT, "logprobs": 2}
    reply = (await served.http.post("/v1/completions", json=body)).json()
    tokens = greedy(reference, ids, NUM)
    choice = reply["choices"][0]
    assert choice["text"] == served.text(tokens)
    assert len(choice["logprobs"]["token_logprobs"]) == len(tokens)
    assert choice["logprobs"]["text_offset"][0] == 0 and len(choice["logprobs"]["top_logprobs"][0]) == 2
    stream = await served.http.post("/v1/completions", json=body | {"stream": True, "logprobs": None})
    assert stream.headers["content-type"].startswith("text/event-stream")
    assert stream.text.endswith("data: [DONE]\n\n")


async def test_probe_of_native_answer_agrees_fully(served: ServedWorker) -> None:
    usage = (await served.chat(agreement_probe=16))["kv_transfer_params"]
    assert usage["top1_agreement"] == 1.0 and usage["full_prefill_ms"] > 0
    assert (await served.chat())["kv_transfer_params"]["top1_agreement"] is None
