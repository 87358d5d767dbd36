"""Malformed worker replies: never an internal error, and never charged to the tenant."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AbstractAsyncContextManager
from typing import Any

import httpx
import orjson
import pytest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tests.gateway.stack import MESSAGES, Stack, in_process, report, right_answer, text
from tools.fake_worker import FakeWorker
from workers.api.errors import InvalidRequest, Overloaded
from workers.api.http.stream import DONE, event

Chunk = dict[str, Any]

COUNTS = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
LAST = {"choices": [], "usage": COUNTS}
KV = {"epoch": "e", "path": "prefill"}
YES = {"token": "Yes", "logprob": -0.1, "top_logprobs": []}


class ScriptedWorker(FakeWorker):
    """Answers chat completions with a given response."""

    response = Response()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self.response if scope["path"] == "/v1/chat/completions" else super().__call__
        await app(scope, receive, send)


def in_process_with_reply(response: Response, **changes: Any) -> AbstractAsyncContextManager[Stack]:
    small = ScriptedWorker("small-0", "fake-small")
    small.response = response
    return in_process({"small-0": httpx.ASGITransport(small)}, **changes)


def event_stream(chunks: Iterable[Chunk]) -> Response:
    return Response(b"".join(map(event, chunks)) + DONE, media_type="text/event-stream")


def answer_chunks(token: Chunk = YES, finish: Any = "stop", **delta: Any) -> tuple[Chunk, ...]:
    first = {"delta": {"content": "Yes"} | delta, "logprobs": {"content": [token]}}
    return {"choices": [first]}, {"choices": [{"delta": {}, "finish_reason": finish}]}


def chunks_with_usage(usage: Any) -> tuple[Chunk, ...]:
    return *answer_chunks(), {"choices": [], "usage": usage}


def chunks_with_tool_call(**call: Any) -> tuple[Chunk, ...]:
    function = {"name": call.pop("name", "look"), "arguments": "{}"}
    return *answer_chunks(tool_calls=[{"index": 0, "id": "call-1", "function": function} | call]), LAST


BROKEN: dict[str, Callable[[], tuple[Chunk, ...]]] = {
    "usage_text": lambda: chunks_with_usage("many"),
    "usage_list": lambda: chunks_with_usage([3, 1]),
    "usage_without_counts": lambda: chunks_with_usage({"tokens": 4}),
    "count_null": lambda: chunks_with_usage(COUNTS | {"prompt_tokens": None}),
    "count_text": lambda: chunks_with_usage(COUNTS | {"completion_tokens": "one"}),
    "count_negative": lambda: chunks_with_usage(COUNTS | {"prompt_tokens": -3}),
    "count_not_a_whole_number": lambda: chunks_with_usage(COUNTS | {"completion_tokens": 1e300}),
    "logprob_above_0": lambda: (*answer_chunks(YES | {"logprob": 1e308}), LAST),
    "top_logprob_above_0": lambda: (*answer_chunks(YES | {"top_logprobs": [YES | {"logprob": 5}]}), LAST),
    "text_not_a_string": lambda: (*answer_chunks(content=["Yes"]), LAST),
    "finish_not_a_string": lambda: (*answer_chunks(finish=5), LAST),
    "cache_negative": lambda: (*answer_chunks(), LAST | {"kv_transfer_params": KV | {"cached_tokens": -1}}),
    "call_id_not_a_string": lambda: chunks_with_tool_call(id=5),
    "call_name_not_a_string": lambda: chunks_with_tool_call(name=5),
}


@pytest.mark.parametrize("policy", ["confidence", "verifier"])
@pytest.mark.parametrize("broken", BROKEN)
async def test_a_malformed_chunk_counts_as_a_worker_failure(broken: str, policy: str) -> None:
    async with in_process_with_reply(event_stream(BROKEN[broken]()), policy={"name": policy}) as stack:
        reply = await stack.chat()
        assert (text(reply), report(reply)["path"]) == (
            right_answer(stack.large, MESSAGES),
            "fallback:small_worker_unavailable",
        )
        assert (await stack.chat(model="small")).status_code == 502
        used = stack.app.state.gateway.usage.report()["tenants"]["default"]
        assert used["requests"] == 2 and 0 < used["tokens_read"] < 3000


async def test_a_logprob_slightly_above_zero_is_accepted() -> None:
    async with in_process_with_reply(event_stream((*answer_chunks(YES | {"logprob": 1e-7}), LAST))) as stack:
        assert text(await stack.chat()) == "Yes"


class EndlessBody(httpx.AsyncByteStream):
    """A body that never ends."""

    def __init__(self, piece: bytes, interval_s: float):
        self.num_pieces = 0
        self._piece = piece
        self._interval_s = interval_s

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            await asyncio.sleep(self._interval_s)
            self.num_pieces += 1
            yield self._piece


class EndlessTransport(httpx.ASGITransport):
    """Calls a fake worker, and replaces its chat answers by an endless body."""

    def __init__(self, status: int, body: EndlessBody):
        super().__init__(FakeWorker("small-0", "fake-small"))
        self._status = status
        self._body = body

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path != "/v1/chat/completions":
            return await super().handle_async_request(request)
        return httpx.Response(self._status, stream=self._body)


@pytest.mark.parametrize(
    ("status", "piece", "interval_s", "expected"),
    [
        (500, b" ", 0.05, 504),
        (500, b" " * 2**21, 0.0, 502),
        (200, b": still here\n\n", 0.05, 504),
        (200, b"data: " + b"a" * 2**20, 0.0, 502),
    ],
    ids=["slow_error", "fast_error", "comments_only", "fast_frame"],
)
async def test_an_endless_reply_is_cut_off(status: int, piece: bytes, interval_s: float, expected: int) -> None:
    # A fast body reaches the byte limit, on a slow machine too. A slow one reaches the deadline.
    body = EndlessBody(piece, interval_s)
    transports = {"small-0": EndlessTransport(status, body)}
    deadlines = {"request_s": 0.5 if expected == 504 else 15.0, "decode_reserve_s": 0.1}
    async with in_process(transports, deadlines=deadlines) as stack, asyncio.timeout(20):
        assert (await stack.chat(model="small")).status_code == expected
        assert body.num_pieces < 50


@pytest.mark.parametrize(
    ("retry_after", "expected"), [("7", "7"), ("nan", "1"), ("inf", "1"), ("-5", "1"), ("1e300", "1")]
)
async def test_a_malformed_retry_after_is_replaced(retry_after: str, expected: str) -> None:
    body = orjson.dumps(Overloaded("full").body())
    async with in_process_with_reply(Response(body, 503, {"retry-after": retry_after})) as stack:
        reply = await stack.chat(model="small")
        assert (reply.status_code, reply.headers["retry-after"]) == (503, expected)


async def test_a_malformed_error_param_is_dropped() -> None:
    error = InvalidRequest("no").body()["error"] | {"param": {"of": "what"}}
    async with in_process_with_reply(Response(orjson.dumps({"error": error}), 400)) as stack:
        reply = await stack.chat(model="small")
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, None)
