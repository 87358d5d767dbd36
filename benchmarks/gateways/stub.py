"""The upstream of all gateways: an OpenAI server and a kvrelay worker in one, cheap enough not to be the bottleneck.

It answers what the last message asks for, `Say 8 words, one every 250 ms.`, whole or as a stream. Without a pause, a
stream is sent in one write. With `interval_ms`, all words but the first are in one frame, as a worker sends them. It
caches nothing, but returns cache ids, so that a gateway stores them and finds them again.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import sys
import time
from typing import Any, cast

import httptools
import orjson
import uvloop

from workers.api.schemas import KVLayout, KVUsage, Rates, WorkerInfo

MODEL = "stub"
WORD = "word "
PROMPT_TOKENS = 300
ASKED = re.compile(rb"Say (\d+) words, one every (\d+) ms")
BUFFERED = re.compile(rb'"interval_ms":[1-9]')

EPOCH = f"stub-{os.getpid()}"
HEX = "0" * 64
LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=8, block_tokens=16, dtype="float32")
INFO = WorkerInfo(
    worker=MODEL,
    model=MODEL,
    fingerprint=HEX,
    engine="stub",
    device="none",
    layout=LAYOUT,
    epoch=EPOCH,
    max_model_len=1 << 20,
    transports=[],
    bundles=[],
    pool_blocks=1,
    free_blocks=1,
    rates=Rates(),
    pid=os.getpid(),
)
CACHE_NUMBERS = itertools.count()


class Stub(asyncio.Protocol):
    """One connection."""

    def __init__(self) -> None:
        self._parser = httptools.HttpRequestParser(self)
        self._url = b""
        self._body: list[bytes] = []
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport is not a subclass

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._url, self._body = url, []

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        if self._url.endswith(b"/chat/completions"):
            self._answer(b"".join(self._body))
        elif self._url.endswith(b"/models"):
            self._reply({"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "stub"}]})
        else:
            self._reply(INFO.model_dump() if self._url == b"/v1/info" else {"status": "ok"})

    def _answer(self, body: bytes) -> None:
        asked = ASKED.search(body)
        num_words, every_ms = (int(number) for number in asked.groups()) if asked else (1, 0)
        if b'"stream":true' not in body and b'"stream": true' not in body:
            self._reply(_whole(num_words))
            return
        self._write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        opening = frame(choices=[_choice({"role": "assistant", "content": ""})])
        ending = _ending(num_words, as_worker=b'"tenant_salt"' in body, with_usage=b'"include_usage"' in body)
        pieces = [WORD, WORD * (num_words - 1)] if BUFFERED.search(body) and not every_ms else [WORD] * num_words
        frames = [opening, *(frame(choices=[_choice({"content": piece})]) for piece in pieces), ending]
        if every_ms:
            self._write_on(iter(frames), every_ms / 1000)
        else:
            self._write(b"".join(map(chunked, frames)) + chunked(b""))

    def _write_on(self, frames: Any, pause_s: float) -> None:
        if self._transport is None:
            return
        one = next(frames, b"")
        self._write(chunked(one))
        if one:
            asyncio.get_running_loop().call_later(pause_s, self._write_on, frames, pause_s)

    def _reply(self, body: dict[str, Any]) -> None:
        raw = orjson.dumps(body)
        self._write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(raw) + raw)

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)


def frame(**fields: Any) -> bytes:
    head = {"id": "chatcmpl-stub", "object": "chat.completion.chunk", "created": 1, "model": MODEL}
    return b"data: " + orjson.dumps(head | fields) + b"\n\n"


def chunked(data: bytes) -> bytes:
    return b"%x\r\n" % len(data) + data + b"\r\n"


def _choice(delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


def _whole(num_words: int) -> dict[str, Any]:
    message = {"role": "assistant", "content": WORD * num_words}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
    head = {"id": "chatcmpl-stub", "object": "chat.completion", "created": 1, "model": MODEL}
    return head | {"choices": [choice], "usage": _usage(num_words)}


def _ending(num_words: int, *, as_worker: bool, with_usage: bool) -> bytes:
    frames = frame(choices=[_choice({}, "stop")])
    if with_usage or as_worker:
        kv = {"kv_transfer_params": _cache(num_words).model_dump()} if as_worker else {}
        frames += frame(choices=[], usage=_usage(num_words), **kv)
    return frames + b"data: [DONE]\n\n"


def _usage(num_words: int) -> dict[str, int]:
    total = PROMPT_TOKENS + num_words
    return {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": num_words, "total_tokens": total}


def _cache(num_words: int) -> KVUsage:
    """Return a new cache for every answer, as a worker does."""
    return KVUsage(
        cache_id=f"kvc-{next(CACHE_NUMBERS):032x}",
        num_tokens=PROMPT_TOKENS + num_words,
        digest=HEX,
        epoch=EPOCH,
        expires_at=time.time() + 300,
        path="exact",
        cached_tokens=PROMPT_TOKENS - 20,
        stable_tokens=PROMPT_TOKENS - 20,
        prefill_ms=1.0,
    )


async def serve(port: int) -> None:
    """Serve until the process is killed."""
    server = await asyncio.get_running_loop().create_server(Stub, "127.0.0.1", port, backlog=2048)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1])))
