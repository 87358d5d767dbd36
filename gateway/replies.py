"""What the client gets: a worker's chunks made the gateway's own, and either sent on or put together."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import orjson
import structlog

from gateway import errors
from gateway.gathered import Chunk, Gathered
from gateway.turn import Turn
from workers.api.errors import KvrelayError

log = structlog.get_logger()

DONE = b"data: [DONE]\n\n"


def sse(data: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(data) + b"\n\n"


async def completion(turn: Turn, chunks: AsyncGenerator[Chunk, None]) -> dict[str, Any]:
    """The whole answer, as one chat completion."""
    gathered = Gathered()
    async with aclosing(chunks):
        async for chunk in chunks:
            gathered.add(chunk)
    choice = {
        "index": 0,
        "message": gathered.message,
        "logprobs": {"content": _logprobs(turn, gathered.logprobs)} if turn.request.logprobs else None,
        "finish_reason": gathered.finish_reason or "stop",
    }
    head = _head(turn, "chat.completion")
    return head | {"choices": [choice], "usage": _usage(turn, gathered.usage), "kvrelay": turn.report.told()}


async def frames(turn: Turn, chunks: AsyncGenerator[Chunk, None]) -> AsyncGenerator[bytes, None]:
    """The answer as server-sent events. What goes wrong before the first is raised; later it is one error frame.

    What ends the answer (finish reason, usage) is held back until all is over: the last chunk carries `kvrelay`.
    """
    head: dict[str, Any] | None = None
    ending = Gathered()
    finish: list[dict[str, Any]] = []
    async with aclosing(chunks):
        try:
            async for chunk in chunks:
                head = head or _head(turn, "chat.completion.chunk")
                ending.add(chunk)
                choices = [_choice(turn, choice) for choice in chunk.get("choices") or ()]
                finish.extend(choice for choice in choices if choice["finish_reason"])
                if choices and not finish:
                    yield sse(head | {"choices": choices})
        except Exception as error:
            if head is None:
                raise
            yield sse(errors.body(_told(turn, error)))
            return
    for last in _last(turn, finish, ending.usage):
        yield sse((head or {}) | last)
    yield DONE


def _told(turn: Turn, error: Exception) -> KvrelayError:
    """What an error after content is told as."""
    if isinstance(error, KvrelayError):
        log.info("stream_broke_off", request_id=turn.id, code=error.code)
        return error
    log.error("internal_error", request_id=turn.id, **errors.loggable(error))
    return errors.InternalError("internal error")


def _last(turn: Turn, finish: list[dict[str, Any]], usage: dict[str, Any] | None) -> list[Chunk]:
    kvrelay = {"kvrelay": turn.report.told()}
    if not turn.request.include_usage:
        return [{"choices": finish} | kvrelay]
    return [{"choices": finish}, {"choices": [], "usage": _usage(turn, usage)} | kvrelay]


def _head(turn: Turn, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": turn.model}


def _choice(turn: Turn, choice: dict[str, Any]) -> dict[str, Any]:
    """The worker's choice, without log-probabilities that only the policy asked for."""
    told = choice.get("logprobs") if turn.request.logprobs else None
    return {
        "index": 0,
        "delta": choice.get("delta") or {},
        "logprobs": told and {"content": _logprobs(turn, told.get("content") or [])},
        "finish_reason": choice.get("finish_reason"),
    }


def _logprobs(turn: Turn, tokens: list[dict[str, Any]]) -> list[dict[str, Any]]:
    most = turn.request.top_logprobs
    return [token | {"top_logprobs": (token.get("top_logprobs") or [])[:most]} for token in tokens]


def _usage(turn: Turn, usage: dict[str, Any] | None) -> dict[str, Any]:
    """The worker's, with exact prefix hits as `cached_tokens`; mapped tokens are told in `kvrelay` only."""
    told = dict(usage or {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0})
    return told | {"prompt_tokens_details": {"cached_tokens": turn.report.cached_tokens or 0}}
