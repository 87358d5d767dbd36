"""`EventStream`: server-sent events whose status is not sent before there is something to send."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import orjson
import structlog
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from workers.api.errors import KvrelayError
from workers.routes.hangup import until_hang_up
from workers.routes.replies import ClientGone, internal_error

log = structlog.get_logger()

DONE = b"data: [DONE]\n\n"
STALL_S = 30.0  # a client that takes nothing for so long counts as gone


def frame(body: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(body) + b"\n\n"


class EventStream(StreamingResponse):
    """Sends frames as `frames` yields them.

    What fails before the first frame is raised, and so becomes a real HTTP status. What fails later becomes one error
    frame, and the stream ends without `[DONE]`. A client that hangs up closes `frames`, and `on_gone` hears of it.
    """

    def __init__(self, frames: AsyncGenerator[bytes, None], on_gone: Callable[[], object]):
        super().__init__(frames, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self._frames = frames
        self._on_gone = on_gone
        self._begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_hang_up(self._stream(send), receive, self._on_gone)
        except ClientGone:
            if not self._begun:
                raise

    async def _stream(self, send: Send) -> None:
        async with aclosing(self._frames) as frames:
            first = await anext(frames)
            self._begun = True
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await _send_frame(send, first)
            try:
                async for later in frames:
                    await _send_frame(send, later)
            except KvrelayError as error:
                await _send_frame(send, frame(error.body()))
            except ClientGone:
                raise
            except Exception:
                log.exception("stream_failed")
                await _send_frame(send, frame(internal_error().body()))
        await _send_frame(send, b"", more_body=False)


async def _send_frame(send: Send, content: bytes, *, more_body: bool = True) -> None:
    try:
        async with asyncio.timeout(STALL_S):
            await send({"type": "http.response.body", "body": content, "more_body": more_body})
    except TimeoutError as error:
        raise ClientGone from error
