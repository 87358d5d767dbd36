"""The client's end: racing its hang-up, reading its body in time, streaming to it with keep-alives."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing, closing, suppress
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.errors import ClientDisconnected
from workers.api.errors import RequestTooSlow
from workers.api.tasks import cancel_and_wait

T = TypeVar("T")

KEEP_ALIVE = b": keep-alive\n\n"


async def read_body(receive: Receive, within_s: float) -> bytes:
    """Raises `RequestTooSlow` for a client that sends too slowly, and what `read_whole` does."""
    try:
        async with asyncio.timeout(within_s):
            return await read_whole(receive)
    except TimeoutError as error:
        raise RequestTooSlow(f"the body did not arrive within {within_s:g} s") from error


async def read_whole(receive: Receive) -> bytes:
    """A body, however long it takes. Raises `ClientDisconnected` for a client that hangs up."""
    pieces: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected("the client hung up before its body was there")
        pieces.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(pieces)


async def drop_body(receive: Receive, most: int, within_s: float) -> None:
    """Reads what else comes of a body that nobody needs: up to `most` bytes, for so long. A client whose connection is
    closed while it sends is reset, and may never see its answer."""
    num_bytes = 0
    with suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            while num_bytes <= most:
                message = await receive()
                num_bytes += len(message.get("body", b""))
                if not message.get("more_body", False):
                    return


class HangUp:
    """Listens, while something is done for the client, for it to hang up. To be made once the body has been read."""

    def __init__(self, receive: Receive):
        self._listener = asyncio.create_task(_disconnected(receive))
        self._listener.add_done_callback(self._heard)
        self._working: asyncio.Task[Any] | None = None

    async def race(self, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """The result of the work; or `ClientDisconnected`, once the work is cancelled and has cleaned up.

        After `timeout_s` it raises `TimeoutError`, and the work is cancelled likewise. It is done in the caller's task,
        which is cancelled for that and goes on.
        """
        if self._has_hung_up:
            work.close()
            raise ClientDisconnected("the client hung up")
        self._working = working = asyncio.current_task()
        assert working is not None
        try:
            if timeout_s is None:
                return await work
            async with asyncio.timeout(timeout_s):
                return await work
        except asyncio.CancelledError:
            if not self._has_hung_up or working.uncancel():
                raise  # somebody else wants the task to end
            raise ClientDisconnected("the client hung up") from None
        finally:
            self._working = None

    def close(self) -> None:
        self._listener.cancel()

    @property
    def _has_hung_up(self) -> bool:
        return self._listener.done() and not self._listener.cancelled()

    def _heard(self, listener: asyncio.Task[None]) -> None:
        if listener.cancelled():
            return
        listener.exception()  # looked at: whatever it is, nothing more is heard of the client
        if self._working is not None:
            self._working.cancel()


class Pump:
    """Runs an async generator in one task of its own, one item ahead at most; closing it cancels that task."""

    def __init__(self, items: AsyncGenerator[bytes, None]):
        self._queue: asyncio.Queue[bytes | BaseException | None] = asyncio.Queue(maxsize=1)
        self._task = asyncio.create_task(self._run(items))

    async def next(self) -> bytes | None:
        """The next item; None at the end. Raises what the generator raised."""
        item = await self._queue.get()
        if isinstance(item, BaseException):
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
        await self._queue.put(failure)


class EventStream(Response):
    """Server-sent events whose first frame is already there. Ends early when the client hangs up."""

    media_type = "text/event-stream"

    def __init__(
        self,
        first: bytes,
        pump: Pump,
        hang_up: HangUp,
        *,
        headers: dict[str, str],
        keep_alive_s: float,
        on_hang_up: Callable[[], None],
    ):
        super().__init__(headers=headers | {"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._first = first
        self._pump = pump
        self._hang_up = hang_up
        self._keep_alive_s = keep_alive_s
        self._on_hang_up = on_hang_up

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with closing(self._hang_up):
            async with aclosing(self._pump):
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                try:
                    await self._send_frames(send)
                except ClientDisconnected:
                    self._on_hang_up()

    async def _send_frames(self, send: Send) -> None:
        frame: bytes | None = self._first
        while frame is not None:
            await self._hang_up.race(_send(send, frame))
            frame = await self._next()
        await self._hang_up.race(_send(send, b"", more_body=False))

    async def _next(self) -> bytes | None:
        try:
            return await self._hang_up.race(self._pump.next(), self._keep_alive_s)
        except TimeoutError:
            return KEEP_ALIVE


async def _send(send: Send, frame: bytes, *, more_body: bool = True) -> None:
    await send({"type": "http.response.body", "body": frame, "more_body": more_body})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
