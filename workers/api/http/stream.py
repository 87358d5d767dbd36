"""`EventStream`: server-sent events whose status is sent with the first frame."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, suppress
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from workers.api.errors import KvrelayError
from workers.api.http.disconnect import DisconnectWatch
from workers.api.http.errors import ClientDisconnected
from workers.api.tasks import cancel_and_wait

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


def event(data: Any) -> bytes:
    """One frame."""
    return b"data: " + orjson.dumps(data) + b"\n\n"


class Pump:
    """Runs an async generator in a task of its own, at most one item ahead. Closing it cancels that task."""

    def __init__(self, items: AsyncGenerator[bytes, None]):
        self._queue: asyncio.Queue[bytes | Exception | None] = asyncio.Queue(maxsize=1)
        self._task = asyncio.create_task(self._run(items))

    async def next(self) -> bytes | None:
        """The next item; None at the end. Raises what the generator raised."""
        item = await self._queue.get()
        if isinstance(item, Exception):
            raise item
        return item

    async def aclose(self) -> None:
        await cancel_and_wait(self._task)

    async def _run(self, items: AsyncGenerator[bytes, None]) -> None:
        failure: Exception | None = None
        async with aclosing(items):
            try:
                async for item in items:
                    await self._queue.put(item)
            except Exception as error:
                failure = error
        if failure is not None:
            await self._queue.put(failure)
        await self._queue.put(None)


class EventStream(Response):
    """Frames, sent as they come. Make one with `open`."""

    media_type = "text/event-stream"

    def __init__(
        self,
        first: bytes,
        pump: Pump,
        watch: DisconnectWatch,
        on_error: Callable[[Exception], KvrelayError],
        headers: Mapping[str, str],
        keep_alive_s: float | None,
    ):
        super().__init__(headers=dict(headers) | {"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._first = first
        self._pump = pump
        self._watch = watch
        self._on_error = on_error
        self._keep_alive_s = keep_alive_s

    @classmethod
    async def open(
        cls,
        frames: AsyncGenerator[bytes, None],
        watch: DisconnectWatch,
        *,
        on_error: Callable[[Exception], KvrelayError],
        headers: Callable[[], Mapping[str, str]] = dict,
        keep_alive_s: float | None = None,
    ) -> EventStream:
        """Wait for the first frame: what fails before it is raised, and becomes a real HTTP status.

        What fails later ends the stream with one frame, the error that `on_error` returns, and without `[DONE]`.
        `headers` is called when the first frame is there. A comment keeps the connection alive while no frame comes for
        `keep_alive_s`. A disconnect cancels `frames`. Closes `watch`.
        """
        pump = Pump(frames)
        try:
            with watch.guard():
                first = await pump.next()
            assert first is not None, "a stream has at least one frame"
            return cls(first, pump, watch, on_error, headers(), keep_alive_s)
        except BaseException:
            watch.close()
            await pump.aclose()
            raise

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(ClientDisconnected), self._watch.guard():
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                frame: bytes | None = self._first
                while frame is not None:
                    await send({"type": "http.response.body", "body": frame, "more_body": True})
                    frame = await self._next()
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._watch.close()
            await self._pump.aclose()

    async def _next(self) -> bytes | None:
        try:
            async with asyncio.timeout(self._keep_alive_s) as quiet:
                return await self._pump.next()
        except Exception as error:
            return KEEP_ALIVE if quiet.expired() else event(self._on_error(error).body())
