"""A worker whose answers are none: whatever they hold, nobody gets a bug's 500 for it, and nobody pays by it."""

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


class Scripted(FakeWorker):
    """Answers with what it is given."""

    scripted = Response()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        replies = self.scripted if scope["path"] == "/v1/chat/completions" else super().__call__
        await replies(scope, receive, send)


def small_answers(answer: Response, **changes: Any) -> AbstractAsyncContextManager[Stack]:
    small = Scripted("small-0", "fake-small")
    small.scripted = answer
    return in_process({"small-0": httpx.ASGITransport(small)}, **changes)


def stream_of(chunks: Iterable[Chunk]) -> Response:
    return Response(b"".join(map(event, chunks)) + DONE, media_type="text/event-stream")


def written(token: Chunk = YES, finish: Any = "stop", **delta: Any) -> tuple[Chunk, ...]:
    first = {"delta": {"content": "Yes"} | delta, "logprobs": {"content": [token]}}
    return {"choices": [first]}, {"choices": [{"delta": {}, "finish_reason": finish}]}


def counted(usage: Any) -> tuple[Chunk, ...]:
    return *written(), {"choices": [], "usage": usage}


def called(**call: Any) -> tuple[Chunk, ...]:
    function = {"name": call.pop("name", "look"), "arguments": "{}"}
    return *written(tool_calls=[{"index": 0, "id": "call-1", "function": function} | call]), LAST


BROKEN: dict[str, Callable[[], tuple[Chunk, ...]]] = {
    "usage_text": lambda: counted("many"),
    "usage_list": lambda: counted([3, 1]),
    "usage_without_counts": lambda: counted({"tokens": 4}),
    "count_null": lambda: counted(COUNTS | {"prompt_tokens": None}),
    "count_text": lambda: counted(COUNTS | {"completion_tokens": "one"}),
    "count_negative": lambda: counted(COUNTS | {"prompt_tokens": -3}),
    "count_no_whole_number": lambda: counted(COUNTS | {"completion_tokens": 1e300}),
    "logprob_above_0": lambda: (*written(YES | {"logprob": 1e308}), LAST),
    "likeliest_above_0": lambda: (*written(YES | {"top_logprobs": [YES | {"logprob": 5}]}), LAST),
    "text_no_text": lambda: (*written(content=["Yes"]), LAST),
    "finish_no_text": lambda: (*written(finish=5), LAST),
    "cache_negative": lambda: (*written(), LAST | {"kv_transfer_params": KV | {"cached_tokens": -1}}),
    "call_id_no_text": lambda: called(id=5),
    "call_name_no_text": lambda: called(name=5),
}


@pytest.mark.parametrize("policy", ["confidence", "verifier"])
@pytest.mark.parametrize("broken", BROKEN)
async def test_a_chunk_that_is_none_is_a_workers_failure(broken: str, policy: str) -> None:
    async with small_answers(stream_of(BROKEN[broken]()), policy={"name": policy}) as stack:
        reply = await stack.chat()
        assert (text(reply), report(reply)["path"]) == (
            right_answer(stack.large, MESSAGES),
            "fallback:small_worker_unavailable",
        )
        assert (await stack.chat(model="small")).status_code == 502
        used = stack.app.state.gateway.usage.report()["tenants"]["default"]
        assert used["requests"] == 2 and 0 < used["tokens_read"] < 3000


async def test_a_certain_token_may_be_a_little_above_0() -> None:
    async with small_answers(stream_of((*written(YES | {"logprob": 1e-7}), LAST))) as stack:
        assert text(await stack.chat()) == "Yes"


class Endless(httpx.AsyncByteStream):
    """A body of which there is always more."""

    def __init__(self, piece: bytes, every_s: float):
        self.num_pieces = 0
        self._piece = piece
        self._every_s = every_s

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            await asyncio.sleep(self._every_s)
            self.num_pieces += 1
            yield self._piece


class WithoutEnd(httpx.ASGITransport):
    """Carries the calls to a fake, whose answers never end."""

    def __init__(self, status: int, body: Endless):
        super().__init__(FakeWorker("small-0", "fake-small"))
        self._status = status
        self._body = body

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path != "/v1/chat/completions":
            return await super().handle_async_request(request)
        return httpx.Response(self._status, stream=self._body)


@pytest.mark.parametrize(
    ("status", "piece", "every_s", "told_as"),
    [
        (500, b" ", 0.05, 504),
        (500, b" " * 2**21, 0.0, 502),
        (200, b": still here\n\n", 0.05, 504),
        (200, b"data: " + b"a" * 2**20, 0.0, 502),
    ],
    ids=["error_that_drips", "error_that_floods", "comments_only", "frame_that_floods"],
)
async def test_a_reply_without_an_end_is_given_up(status: int, piece: bytes, every_s: float, told_as: int) -> None:
    # What floods meets its bound in bytes, on a slow machine too; what drips meets the deadline.
    body, times = Endless(piece, every_s), {"request_s": 0.5 if told_as == 504 else 15.0, "decode_reserve_s": 0.1}
    async with in_process({"small-0": WithoutEnd(status, body)}, deadlines=times) as stack, asyncio.timeout(20):
        assert (await stack.chat(model="small")).status_code == told_as
        assert body.num_pieces < 50


@pytest.mark.parametrize(("told_us", "is_told"), [("7", "7"), ("nan", "1"), ("inf", "1"), ("-5", "1"), ("1e300", "1")])
async def test_a_time_that_is_none_is_not_passed_on(told_us: str, is_told: str) -> None:
    body = orjson.dumps(Overloaded("full").body())
    async with small_answers(Response(body, 503, {"retry-after": told_us})) as stack:
        reply = await stack.chat(model="small")
        assert (reply.status_code, reply.headers["retry-after"]) == (503, is_told)


async def test_a_param_that_is_none_is_not_passed_on() -> None:
    error = InvalidRequest("no").body()["error"] | {"param": {"of": "what"}}
    async with small_answers(Response(orjson.dumps({"error": error}), 400)) as stack:
        reply = await stack.chat(model="small")
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, None)
