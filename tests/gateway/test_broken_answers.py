"""A worker whose answers are none: whatever they hold, nobody gets a bug's 500 for it, and nobody pays by it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.replies import DONE, sse
from tests.gateway.stack import MESSAGES, in_process, right_answer, text, told
from workers.api.fake import FakeWorker

Chunk = dict[str, Any]

COUNTS = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
LAST = {"choices": [], "usage": COUNTS}
YES = {"token": "Yes", "logprob": -0.1, "top_logprobs": []}


class Scripted(FakeWorker):
    """Answers with the chunks that it is given."""

    script: tuple[Chunk, ...] = ()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] != "/v1/chat/completions":
            await super().__call__(scope, receive, send)
            return
        frames = b"".join(map(sse, self.script)) + DONE
        await Response(frames, media_type="text/event-stream")(scope, receive, send)


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
    "call_id_no_text": lambda: called(id=5),
    "call_name_no_text": lambda: called(name=5),
}


@pytest.mark.parametrize("policy", ["confidence", "verifier"])
@pytest.mark.parametrize("broken", BROKEN)
async def test_a_chunk_that_is_none_is_a_workers_failure(broken: str, policy: str) -> None:
    small = Scripted("small-0", "fake-small")
    small.script = BROKEN[broken]()
    async with in_process({"small-0": httpx.ASGITransport(small)}, policy={"name": policy}) as stack:
        reply = await stack.chat()
        assert (text(reply), told(reply)["path"]) == (
            right_answer(stack.large, MESSAGES),
            "fallback:small_worker_unavailable",
        )
        assert (await stack.chat(model="small")).status_code == 502
        used = stack.app.state.gateway.usage.told()["tenants"]["default"]
        assert used["requests"] == 2 and 0 < used["tokens_read"] < 3000


async def test_a_certain_token_may_be_a_little_above_0() -> None:
    small = Scripted("small-0", "fake-small")
    small.script = (*written(YES | {"logprob": 1e-7}), LAST)
    async with in_process({"small-0": httpx.ASGITransport(small)}) as stack:
        assert text(await stack.chat()) == "Yes"
