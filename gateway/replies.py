"""What the client gets: a worker's chunks made the gateway's own, and either sent on or put together."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import orjson
import structlog

from gateway import errors
from gateway.gathered import Chunk, Gathered
from gateway.texts import as_text_logprobs
from gateway.turn import Turn
from workers.api.errors import KvrelayError
from workers.api.logs import exception_fields, new_request_id

log = structlog.get_logger()

DONE = b"data: [DONE]\n\n"

Body = dict[str, Any]


class ChatShape:
    """One answer's choices, as `/v1/chat/completions` writes them; whole, or chunk by chunk."""

    id_prefix, whole, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, num_top_logprobs: int | None):
        self._num_top = num_top_logprobs

    def whole_choice(self, gathered: Gathered) -> Body:
        return {"message": gathered.message, "logprobs": self._logprobs(gathered.logprobs)}

    def chunk_choice(self, choice: Body) -> Body:
        """The worker's choice, without log-probabilities that only the policy asked for."""
        told = choice.get("logprobs")
        logprobs = self._logprobs(told.get("content") or []) if told else None
        return {"delta": choice.get("delta") or {}, "logprobs": logprobs}

    def _logprobs(self, tokens: list[Body]) -> Body | None:
        return None if self._num_top is None else {"content": self._cut(tokens)}

    def _cut(self, tokens: list[Body]) -> list[Body]:
        return [token | {"top_logprobs": (token.get("top_logprobs") or [])[: self._num_top]} for token in tokens]


class TextShape(ChatShape):
    """The same, as `/v1/completions` writes them."""

    id_prefix, whole, chunk = "cmpl", "text_completion", "text_completion"

    def __init__(self, num_top_logprobs: int | None):
        super().__init__(num_top_logprobs)
        self._offset = 0

    def whole_choice(self, gathered: Gathered) -> Body:
        return {"text": gathered.message["content"] or "", "logprobs": self._logprobs(gathered.logprobs)}

    def chunk_choice(self, choice: Body) -> Body:
        told = super().chunk_choice(choice)
        return {"text": told["delta"].get("content") or "", "logprobs": told["logprobs"]}

    def _logprobs(self, tokens: list[Body]) -> Body | None:
        if self._num_top is None:
            return None
        offset, self._offset = self._offset, self._offset + sum(len(str(token["token"])) for token in tokens)
        return as_text_logprobs(self._cut(tokens), offset)


def completion(turn: Turn, gathered: Gathered) -> Body:
    """The whole answer, as one completion."""
    shape = _shape(turn)
    choice = {"index": 0} | shape.whole_choice(gathered) | {"finish_reason": gathered.finish_reason or "stop"}
    head = _head(turn, shape, shape.whole)
    return head | {"choices": [choice], "usage": _usage(turn, gathered.usage), "kvrelay": turn.report.told()}


async def frames(
    turn: Turn, pieces: AsyncGenerator[list[Chunk], None], on_error: Callable[[KvrelayError], None]
) -> AsyncGenerator[bytes, None]:
    """The answer as server-sent events. What goes wrong before the first is raised; later it is one error frame, and
    `on_error` is told.

    What ends the answer (finish reason, usage) is held back until all is over: the last chunk carries `kvrelay`.
    """
    head: Body | None = None
    ending, shape = Gathered(), _shape(turn)
    finish: list[Body] = []
    async with aclosing(pieces):
        try:
            async for piece in pieces:
                head = head or _head(turn, shape, shape.chunk)
                told = []
                for chunk in piece:
                    ending.add(chunk)
                    choices = [_choice(shape, choice) for choice in chunk.get("choices") or ()]
                    finish.extend(choice for choice in choices if choice["finish_reason"])
                    if choices and not finish:
                        told.append(sse(head | {"choices": choices}))
                if told:
                    yield b"".join(told)
        except Exception as error:
            if head is None:
                raise
            told_as = errors.for_client(_told(turn, error))
            on_error(told_as)
            yield sse(told_as.body())
            return
    for last in _last(turn, finish, ending.usage):
        yield sse((head or {}) | last)
    yield DONE


def sse(data: Body) -> bytes:
    return b"data: " + orjson.dumps(data) + b"\n\n"


def _shape(turn: Turn) -> ChatShape:
    return (ChatShape if turn.request.is_chat else TextShape)(turn.request.num_top_logprobs)


def _choice(shape: ChatShape, choice: Body) -> Body:
    return {"index": 0} | shape.chunk_choice(choice) | {"finish_reason": choice.get("finish_reason")}


def _told(turn: Turn, error: Exception) -> KvrelayError:
    """What an error after content is told as."""
    if isinstance(error, KvrelayError):
        log.info("stream_broke_off", code=error.code)
        return error
    log.error("internal_error", **exception_fields(error))
    return errors.InternalError("internal error")


def _last(turn: Turn, finish: list[Body], usage: Body | None) -> list[Chunk]:
    kvrelay = {"kvrelay": turn.report.told()}
    if not turn.request.include_usage:
        return [{"choices": finish} | kvrelay]
    return [{"choices": finish}, {"choices": [], "usage": _usage(turn, usage)} | kvrelay]


def _head(turn: Turn, shape: ChatShape, kind: str) -> Body:
    answer_id = f"{shape.id_prefix}-{new_request_id()}"
    return {"id": answer_id, "object": kind, "created": int(time.time()), "model": turn.model}


def _usage(turn: Turn, usage: Body | None) -> Body:
    """The worker's, with exact prefix hits as `cached_tokens`; mapped tokens are told in `kvrelay` only."""
    told = dict(usage or {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0})
    return told | {"prompt_tokens_details": {"cached_tokens": turn.report.cached_tokens or 0}}
