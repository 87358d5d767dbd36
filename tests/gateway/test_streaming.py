"""Streams over real sockets: frames, held-back tokens, errors before and after the first content."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import orjson
import pytest

from tests.gateway.stack import MESSAGES, Stack, eventually, live_stack, report, right_answer, text
from workers.api.errors import Overloaded, TransferFailed, WorkerUnavailable


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    async with live_stack() as stack:
        yield stack


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "auto", "messages": MESSAGES, "stream": True} | fields


async def streamed(stack: Stack, **fields: Any) -> tuple[httpx.Response, list[str]]:
    """The reply and its frames, without comments."""
    async with stack.http.stream("POST", "/v1/chat/completions", json=body(**fields)) as reply:
        lines = [line async for line in reply.aiter_lines()]
    return reply, [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]


def chunks(frames: list[str]) -> list[dict[str, Any]]:
    return [orjson.loads(frame) for frame in frames if frame != "[DONE]"]


def joined(frames: list[str]) -> str:
    deltas = [choice["delta"] for chunk in chunks(frames) for choice in chunk.get("choices", [])]
    return "".join(delta.get("content") or "" for delta in deltas)


@pytest.mark.parametrize("unsure", [False, True])
async def test_judged_answer_is_streamed(stack: Stack, unsure: bool) -> None:
    stack.small.logprob = -2.0 if unsure else -0.1
    reply, frames = await streamed(stack)
    answering = stack.large if unsure else stack.small
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert reply.headers["x-kvrelay-model"] == answering.model
    assert reply.headers["x-kvrelay-path"] == ("mapped" if unsure else "prefill")
    assert joined(frames) == right_answer(answering, MESSAGES)
    assert frames[-1] == "[DONE]"
    first, last = chunks(frames)[0], chunks(frames)[-1]
    assert first["choices"][0]["delta"]["role"] == "assistant"
    assert last["choices"][0]["finish_reason"] == "stop"
    assert (last["kvrelay"]["tier"], last["kvrelay"]["path"]) == (answering.name[:5], "mapped" if unsure else "prefill")
    assert {chunk["model"] for chunk in chunks(frames)} == {answering.model}
    assert len({chunk["id"] for chunk in chunks(frames)}) == 1
    assert all(choice["logprobs"] is None for chunk in chunks(frames) for choice in chunk["choices"])


async def test_usage_chunk_comes_last_and_only_on_request(stack: Stack) -> None:
    _, frames = await streamed(stack)
    assert not any("usage" in chunk for chunk in chunks(frames))
    _, frames = await streamed(stack, stream_options={"include_usage": True})
    last = chunks(frames)[-1]
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 7
    assert "kvrelay" in last
    assert "kvrelay" not in chunks(frames)[-2]


async def test_only_the_judged_tokens_are_held_back(stack: Stack) -> None:
    """An accepted answer is streamed on as the small model writes it."""
    stack.small.token_s = 0.15  # 7 words, about a second; 3 are judged
    started = time.monotonic()
    async with stack.http.stream("POST", "/v1/chat/completions", json=body()) as reply:
        first_at = None
        async for line in reply.aiter_lines():
            first_at = first_at or time.monotonic() - started
            assert line is not None
    assert first_at is not None
    assert time.monotonic() - started - first_at > 0.3


async def test_rejected_small_answer_is_cancelled(stack: Stack) -> None:
    stack.small.logprob = -2.0
    stack.small.token_s = 0.1
    _, frames = await streamed(stack)
    assert joined(frames) == right_answer(stack.large, MESSAGES)
    await eventually(lambda: stack.small.num_disconnects == 1)


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (Overloaded("full", retry_after_s=7), 503, "overloaded"),
        (WorkerUnavailable("gone"), 502, "upstream_error"),
    ],
)
async def test_failure_before_content_is_an_http_status(stack: Stack, error: Exception, status: int, code: str) -> None:
    stack.large.fail("chat", error)  # type: ignore[arg-type]
    reply = await stack.http.post("/v1/chat/completions", json=body(model="large"))
    assert (reply.status_code, reply.json()["error"]["code"]) == (status, code)
    assert reply.headers.get("retry-after") == ("7" if status == 503 else None)


@pytest.mark.parametrize("how", ["break_after", "cut_after"])
async def test_failure_after_content_is_one_error_frame_and_ends_the_stream(stack: Stack, how: str) -> None:
    setattr(stack.large, how, 3)
    reply, frames = await streamed(stack, model="large")
    assert reply.status_code == 200
    assert orjson.loads(frames[-1])["error"]["code"] == "upstream_error"
    assert "[DONE]" not in frames
    await eventually(lambda: stack.metric("requests_total", model="large", status="502") == 1)
    assert joined(frames[:-1]) == " ".join(right_answer(stack.large, MESSAGES).split()[:3])
    assert stack.large.requests("chat") and len(stack.large.calls) - len(stack.large.requests("info")) < 10


async def test_broken_whole_answer_is_a_502(stack: Stack) -> None:
    stack.large.break_after = 3
    assert (await stack.chat(model="large")).status_code == 502


async def test_small_answer_that_breaks_before_judging_falls_back(stack: Stack) -> None:
    stack.small.cut_after = 2
    reply, frames = await streamed(stack)
    assert reply.headers["x-kvrelay-path"] == "fallback:small_worker_unavailable"
    assert joined(frames) == right_answer(stack.large, MESSAGES)


async def test_broken_small_answer_frees_its_slot_at_once(stack: Stack) -> None:
    stack.small.cut_after = 2
    stack.large.delay("chat", 0.5)
    request = asyncio.create_task(stack.chat())
    await eventually(lambda: bool(stack.large.requests("chat")))
    assert stack.metric("num_requests_running", tier="small") == 0
    assert (await request).status_code == 200


async def test_text_of_another_model_is_never_spliced_in(stack: Stack) -> None:
    stack.small.cut_after = 5  # judged and begun, then gone
    _, frames = await streamed(stack)
    assert "error" in orjson.loads(frames[-1])
    assert stack.large.requests("chat") == []


async def test_broken_answer_is_replaced_if_the_client_has_seen_nothing(stack: Stack) -> None:
    """As above, but the client has asked for the whole answer."""
    stack.small.cut_after = 5
    reply = await stack.chat()
    assert text(reply) == right_answer(stack.large, MESSAGES)
    assert reply.headers["x-kvrelay-path"] == report(reply)["path"] == "fallback:small_worker_unavailable"
    assert reply.headers["x-kvrelay-model"] == reply.json()["model"] == "fake-large"
    assert report(reply)["tier"] == "large"
    assert stack.metric("full_prefill_fallback_total", reason="small_worker_unavailable") == 1


async def test_replacement_that_breaks_too_is_a_502(stack: Stack) -> None:
    stack.small.cut_after, stack.large.break_after = 5, 3
    assert (await stack.chat()).status_code == 502
    assert len(stack.large.requests("chat")) == 1


async def test_failed_handoff_is_reported_in_the_header_of_a_stream(stack: Stack) -> None:
    stack.large.fail("transfer", TransferFailed("gone"))
    reply, frames = await streamed(stack, kvrelay={"policy": "always_escalate"})
    assert reply.headers["x-kvrelay-path"] == "fallback:transfer_failed"
    assert chunks(frames)[-1]["kvrelay"]["path"] == "fallback:transfer_failed"


@pytest.mark.parametrize("reports_early", [True, False])
async def test_header_and_body_of_a_stream_report_the_same_path(stack: Stack, reports_early: bool) -> None:
    """A prefix that the worker finds by itself is reported with the first chunk, or too late for a header."""
    stack.large.reports_early = reports_early
    await stack.chat(model="large")
    messages = [MESSAGES[0], {"role": "user", "content": "And before word41?"}]
    stack.app.state.gateway.parts.fleet.tiers["large"].workers["large-0"].epoch = "unknown"  # so no cache id is sent
    reply, frames = await streamed(stack, messages=messages, model="large")
    kvrelay = chunks(frames)[-1]["kvrelay"]
    assert kvrelay["cached_tokens"] > 600
    assert reply.headers["x-kvrelay-path"] == kvrelay["path"] == ("exact" if reports_early else "prefill")


async def test_keep_alive_comments_while_no_token_comes() -> None:
    async with live_stack(deadlines={"request_s": 10.0, "keep_alive_s": 0.05}) as stack:
        stack.large.token_s = 0.2
        async with stack.http.stream("POST", "/v1/chat/completions", json=body(model="large")) as reply:
            lines = [line async for line in reply.aiter_lines()]
    assert lines.count(": keep-alive") >= 3
    assert lines[-2:] == ["data: [DONE]", ""]


async def test_stream_ends_at_its_deadline() -> None:
    async with live_stack(deadlines={"request_s": 1.2, "decode_reserve_s": 0.0}) as stack:
        stack.large.token_s = 0.3
        started = time.monotonic()
        _, frames = await streamed(stack, model="large")
        assert time.monotonic() - started < 3.0
        assert orjson.loads(frames[-1])["error"]["code"] == "deadline_exceeded"


async def test_frozen_worker_is_a_504_at_the_deadline() -> None:
    async with live_stack(deadlines={"request_s": 0.5, "decode_reserve_s": 0.0}) as stack:
        stack.large.is_frozen = True
        started = time.monotonic()
        reply = await stack.chat(model="large")
        assert time.monotonic() - started < 2.0
        assert (reply.status_code, reply.json()["error"]["type"]) == (504, "upstream_timeout")
        assert reply.headers["x-should-retry"] == "false"
        stack.large.is_frozen = False


async def test_turn_after_a_streamed_turn_finds_its_cache(stack: Stack) -> None:
    _, frames = await streamed(stack, kvrelay={"policy": "always_escalate"})
    answer = {"role": "assistant", "content": joined(frames)}
    reply = await stack.escalate([*MESSAGES, answer, {"role": "user", "content": "And then?"}])
    assert report(reply)["path"] == "mapped"
    assert len(stack.large.requests("transfer")) == 1


@pytest.mark.parametrize(
    ("fields", "batches"),
    [({"model": "large", "stream": False}, True), ({"model": "large"}, False), ({"stream": False}, False)],
    ids=["whole", "stream", "judged"],
)
async def test_worker_batches_chunks_only_if_the_answer_is_buffered(
    stack: Stack, fields: dict[str, Any], batches: bool
) -> None:
    await stack.http.post("/v1/chat/completions", json=body(**fields))
    call = [*stack.large.requests("chat"), *stack.small.requests("cached_chat")][0]
    assert call["stream_options"]["include_usage"]
    assert (call["stream_options"]["interval_ms"] > 0) == batches
