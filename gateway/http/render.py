"""The answer as the client gets it: one completion, or server-sent events."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from gateway.request.turn import Turn
from gateway.upstream.completion import Chunk, Completion, text_logprobs, text_tokens
from workers.api.http.stream import DONE, event
from workers.api.logs import new_request_id

Body = dict[str, Any]


def completion(turn: Turn, answer: Completion) -> Body:
    """The whole answer, as one chat or text completion."""
    num_top = turn.request.num_top_logprobs
    choice: Body = {"index": 0}
    if turn.request.is_chat:
        choice["message"] = answer.message
        choice["logprobs"] = None if num_top is None else {"content": _cut(answer.logprobs, num_top)}
    else:
        choice["text"] = answer.text
        choice["logprobs"] = None if num_top is None else text_logprobs(answer.tokens, num_top=num_top)
    choice["finish_reason"] = answer.finish_reason or "stop"
    kind = "chat.completion" if turn.request.is_chat else "text_completion"
    report = turn.report()
    return _head(turn, kind) | {"choices": [choice], "usage": _usage(report, answer.usage), "kvrelay": report}


async def frames(turn: Turn, chunks: AsyncGenerator[list[Chunk], None]) -> AsyncGenerator[bytes, None]:
    """The answer as server-sent events. Raises what `chunks` raises.

    The finish reason and the usage are held back until the end: the last chunk carries `kvrelay`.
    """
    chunk_choice = _chat_choice if turn.request.is_chat else _text_choice
    kind = "chat.completion.chunk" if turn.request.is_chat else "text_completion"
    num_top, offset = turn.request.num_top_logprobs, 0
    head: Body = {}
    finish: list[Body] = []
    async with aclosing(chunks):
        async for group in chunks:
            head = head or _head(turn, kind)
            parts = []
            for chunk in group:
                choices = []
                for choice in chunk.get("choices") or ():
                    shown, num_chars = chunk_choice(choice, num_top, offset)
                    choices.append({"index": 0, **shown, "finish_reason": choice.get("finish_reason")})
                    offset += num_chars
                finish.extend(choice for choice in choices if choice["finish_reason"])
                if choices and not finish:
                    parts.append(event(head | {"choices": choices}))
            if parts:
                yield b"".join(parts)
    report = turn.report()
    if turn.request.include_usage:
        usage = _usage(report, turn.answer_stream.completion.usage)
        yield event(head | {"choices": finish})
        yield event(head | {"choices": [], "usage": usage, "kvrelay": report})
    else:
        yield event(head | {"choices": finish, "kvrelay": report})
    yield DONE


def _chat_choice(choice: Body, num_top: int | None, offset: int) -> tuple[Body, int]:
    """The worker's choice, without the log-probabilities that only the policy asked for."""
    delta, logprobs = choice.get("delta") or {}, choice.get("logprobs")
    if num_top is None or not logprobs:
        return {"delta": delta, "logprobs": None}, 0
    return {"delta": delta, "logprobs": {"content": _cut(logprobs.get("content") or [], num_top)}}, 0


def _text_choice(choice: Body, num_top: int | None, offset: int) -> tuple[Body, int]:
    """The same for a text that begins `offset` characters into the answer; and its length in characters."""
    text, logprobs = choice.get("text") or "", choice.get("logprobs")
    if num_top is None or not logprobs:
        return {"text": text, "logprobs": None}, 0
    tokens = text_tokens(logprobs)
    cut = text_logprobs(tokens, num_top=num_top, offset=offset)
    return {"text": text, "logprobs": cut}, sum(len(token.text) for token in tokens)


def _cut(tokens: list[Body], num_top: int) -> list[Body]:
    return [token | {"top_logprobs": (token.get("top_logprobs") or [])[:num_top]} for token in tokens]


def _head(turn: Turn, kind: str) -> Body:
    prefix = "chatcmpl" if turn.request.is_chat else "cmpl"
    return {"id": f"{prefix}-{new_request_id()}", "object": kind, "created": int(time.time()), "model": turn.model}


def _usage(report: Body, usage: Body | None) -> Body:
    """The worker's usage, with exact prefix hits as `cached_tokens`. Mapped tokens are reported in `kvrelay` only."""
    counts = usage or {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
    return counts | {"prompt_tokens_details": {"cached_tokens": report["cached_tokens"] or 0}}
