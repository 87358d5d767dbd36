"""One request to the gateway, and what came of it: an `Exchange`, told whole whether it streamed or not."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx
import orjson

from tools.soak.talks import Ask

Ended = Literal["whole", "error", "cut", "hung_up"]


@dataclass
class Exchange:
    """Instants are of `time.monotonic()`. `ended`: an answer is there, an error was told, what came broke off without a
    word, or this client hung up."""

    tenant: str
    ask: Ask
    began_at: float
    is_fresh: bool = False  # this tenant has never asked about a text that begins so
    ended_at: float = 0.0
    ended: Ended = "cut"
    status: int | None = None  # None: no reply came at all
    headers: dict[str, str] = field(default_factory=dict)
    error: dict[str, Any] = field(default_factory=dict)
    text: str = ""
    tokens: list[dict[str, Any]] = field(default_factory=list)
    told: dict[str, Any] = field(default_factory=dict)  # the reply's field `kvrelay`

    @property
    def took_s(self) -> float:
        return self.ended_at - self.began_at

    @property
    def is_answer(self) -> bool:
        return self.ended == "whole"

    @property
    def path(self) -> str:
        return str(self.told.get("path"))

    @property
    def mapped_tokens(self) -> int:
        return int(self.told.get("mapped_tokens") or 0)

    @property
    def completion(self) -> dict[str, Any]:
        """The answer as a chat completion tells it, streamed or not."""
        choice = {"message": {"content": self.text}, "logprobs": {"content": self.tokens}}
        return {"choices": [choice]}


async def exchange(http: httpx.AsyncClient, exchange: Exchange) -> Exchange:
    """Sends the request, and fills in what comes of it."""
    try:
        await (_streamed if exchange.ask.streams else _whole)(http, exchange)
    except httpx.HTTPError as error:
        exchange.ended, exchange.error = "cut", {"message": repr(error)}
    exchange.ended_at = time.monotonic()
    return exchange


async def _whole(http: httpx.AsyncClient, exchange: Exchange) -> None:
    if exchange.ask.hangs_up_after is not None:
        return await _hung_up(http, exchange)
    reply = await http.post("/v1/chat/completions", json=exchange.ask.body)
    _begun(exchange, reply)
    body = orjson.loads(reply.content)
    if reply.status_code != 200:
        exchange.ended, exchange.error = "error", body.get("error") or {"message": str(body)[:200]}
        return
    choice = body["choices"][0]
    exchange.text, exchange.told = choice["message"]["content"] or "", body["kvrelay"]
    exchange.tokens = (choice["logprobs"] or {}).get("content") or []
    exchange.ended = "whole"


async def _hung_up(http: httpx.AsyncClient, exchange: Exchange) -> None:
    """Leaves after a moment. What had come by then is not looked at."""
    exchange.ended = "hung_up"
    with suppress(httpx.TimeoutException):
        leaves_after_s = 0.1 * (1 + (exchange.ask.hangs_up_after or 0))
        await http.post("/v1/chat/completions", json=exchange.ask.body, timeout=leaves_after_s)


async def _streamed(http: httpx.AsyncClient, exchange: Exchange) -> None:
    async with http.stream("POST", "/v1/chat/completions", json=exchange.ask.body) as reply:
        _begun(exchange, reply)
        if reply.status_code != 200:
            await reply.aread()
            exchange.ended, exchange.error = "error", orjson.loads(reply.content).get("error") or {}
            return
        num_frames = 0
        async for frame in _frames(reply):
            if num_frames == exchange.ask.hangs_up_after:
                exchange.ended = "hung_up"
                return
            num_frames += 1
            if frame == "[DONE]":
                exchange.ended = "whole"
            elif exchange.ended != "error":
                _add(exchange, orjson.loads(frame))


async def _frames(reply: httpx.Response) -> AsyncIterator[str]:
    async for line in reply.aiter_lines():
        if line.startswith("data: "):
            yield line.removeprefix("data: ")


def _begun(exchange: Exchange, reply: httpx.Response) -> None:
    exchange.status, exchange.headers = reply.status_code, dict(reply.headers)


def _add(exchange: Exchange, chunk: dict[str, Any]) -> None:
    if "error" in chunk:
        exchange.ended, exchange.error = "error", chunk["error"]
        return
    exchange.told = chunk.get("kvrelay") or exchange.told
    for choice in chunk["choices"]:
        exchange.text += choice["delta"].get("content") or ""
        exchange.tokens += (choice.get("logprobs") or {}).get("content") or []
