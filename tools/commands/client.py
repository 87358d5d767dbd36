"""A small client of a running gateway for the commands that measure: one streamed chat, timed at the client."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import orjson


class RequestFailed(RuntimeError):
    """The gateway answered with an error; the message is its own."""


@dataclass(frozen=True)
class Answer:
    """`ttft_ms`: from sending the request to the first byte of text. `kvrelay` is the reply's field of that name."""

    text: str
    ttft_ms: float
    kvrelay: dict[str, Any]
    usage: dict[str, Any]


def chat(
    http: httpx.Client,
    messages: Sequence[dict[str, str]],
    *,
    model: str = "auto",
    max_tokens: int = 48,
    options: dict[str, Any] | None = None,
) -> Answer:
    """One greedy, streamed chat completion. Raises `RequestFailed`."""
    body = {
        "model": model,
        "messages": list(messages),
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "kvrelay": options or {},
    }
    extra: dict[str, Any] = {}
    usage: dict[str, Any] = {}
    started, first, text = time.perf_counter(), None, ""
    with http.stream("POST", "/v1/chat/completions", json=body) as reply:
        if reply.status_code != 200:
            reply.read()
            raise RequestFailed(f"status {reply.status_code}: {reply.text[:400]}")
        for line in reply.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = orjson.loads(line[6:])
            if "error" in chunk:
                raise RequestFailed(chunk["error"]["message"])
            content = "".join(choice["delta"].get("content") or "" for choice in chunk.get("choices", []))
            if content and first is None:
                first = time.perf_counter()
            text += content
            extra = chunk.get("kvrelay") or extra
            usage = chunk.get("usage") or usage
    return Answer(text, 1000 * ((first or time.perf_counter()) - started), extra, usage)
