"""Streamed calls to an ASGI application in this process; httpx's own transport returns whole replies only.

The application is at most one piece ahead of its caller, so a hang-up always reaches it at the same point.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
from starlette.types import ASGIApp, Message

ASGI = {"version": "3.0", "spec_version": "2.3"}  # like uvicorn: a stream waits for the disconnect


class AsgiTransport(httpx.AsyncBaseTransport):
    def __init__(self, app: ASGIApp):
        self._app = app

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        exchange = Exchange(self._app, request, await request.aread())
        await exchange.begin()
        return httpx.Response(exchange.status, headers=exchange.headers, stream=exchange)


class Exchange(httpx.AsyncByteStream):
    """One request and its reply. `on_piece` receives each piece the caller takes, `on_end` whether it took all."""

    def __init__(
        self,
        app: ASGIApp,
        request: httpx.Request,
        body: bytes,
        on_piece: Callable[[bytes], None] = lambda piece: None,
        on_end: Callable[[bool], None] = lambda is_whole: None,
    ):
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self._app = app
        self._scope = _scope(request)
        self._body: bytes | None = body
        self._on_piece = on_piece
        self._on_end = on_end
        self._has_ended = False
        self._hung_up = asyncio.Event()
        self._pieces: asyncio.Queue[bytes | None] = asyncio.Queue(maxsize=1)
        self._started = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """Start the call and wait for the reply's head."""
        self._task = asyncio.create_task(self._run())
        try:
            await self._started.wait()
        except BaseException:
            self._end(False)
            raise
        if not self.status:
            self._end(False)
            raise httpx.RemoteProtocolError("the application sent no reply")

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while (piece := await self._pieces.get()) is not None:
            self._on_piece(piece)
            yield piece
        self._end(True)

    async def aclose(self) -> None:
        self._end(False)

    def _end(self, is_whole: bool) -> None:
        if not self._has_ended:
            self._has_ended = True
            self._hung_up.set()
            self._on_end(is_whole)

    async def _run(self) -> None:
        try:
            await self._app(self._scope, self._receive, self._send)
        finally:
            self._started.set()
            await self._put(None)

    async def _receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._hung_up.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], list(message["headers"])
            self._started.set()
        elif message.get("body"):
            await self._put(message["body"])

    async def _put(self, piece: bytes | None) -> None:
        """Pass a piece to the caller; drop it once the caller has hung up."""
        put, gone = asyncio.ensure_future(self._pieces.put(piece)), asyncio.ensure_future(self._hung_up.wait())
        try:
            await asyncio.wait({put, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            put.cancel()
            gone.cancel()


def _scope(request: httpx.Request) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": ASGI,
        "http_version": "1.1",
        "method": request.method,
        "scheme": request.url.scheme,
        "path": request.url.path,
        "raw_path": request.url.raw_path.split(b"?")[0],
        "query_string": request.url.query,
        "root_path": "",
        "headers": [(name.lower(), value) for name, value in request.headers.raw],
        "server": (request.url.host, request.url.port or 80),
        "client": ("127.0.0.1", 50_000),
    }
