"""HTTP/1.1 clients for one worker, behind one small interface.

    HttpClient       the interface
    HttpxClient      httpx: the default, and the way to an ASGI application in this process
    SocketClient     asyncio and httptools, for the gateway's hot path

A gateway makes several calls per request, so `SocketClient` does as little as possible per call: it takes a quarter of
aiohttp's CPU time and a small fraction of httpx's (`benchmarks/upstream.py` measures it). It also tolerates an event
loop that runs late, and checks a kept connection before use.
"""

from __future__ import annotations

import asyncio
import re
import select
import ssl
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager, suppress
from typing import cast
from urllib.parse import urlsplit

import httptools
import httpx

MAX_IDLE = 64
IDLE_S = 2.0  # well before a server closes an idle connection (uvicorn: 5 s)
MAX_BUFFERED_BYTES = 256 * 1024  # per response; beyond that the server has to wait for the reader
MAX_BODY_BYTES = 64 * 2**20
CLOSE_S = 2.0  # how long to wait for open connections to report their end
LATE_TURNS, LATE_TURN_S = 5, 0.01  # extra turns of the event loop after a connect timeout

PATH = re.compile(r"/[!-~]*")


class HttpClientError(Exception):
    """Base of the errors of an `HttpClient`."""


class InvalidPath(HttpClientError):
    """The path cannot be sent over HTTP."""


class ConnectFailed(HttpClientError):
    """No connection was made in time."""


class ReadTimeout(HttpClientError):
    """Nothing arrived in time."""


class ConnectionBroken(HttpClientError):
    """The connection ended early, or what arrived is not HTTP."""


class HttpResponse(ABC):
    """A response whose head has arrived."""

    status: int
    retry_after: str | None

    @abstractmethod
    async def read(self, timeout_s: float | None = None) -> bytes:
        """Return what has arrived of the body, at least one byte; b"" at its end. `timeout_s` defaults to the call's
        own."""

    async def read_all(self, timeout_s: float) -> bytes:
        """Return the whole body. Raises `ReadTimeout` if it takes longer, however steadily it arrives, and
        `ConnectionBroken` above `MAX_BODY_BYTES`."""
        deadline, parts, num_bytes = time.monotonic() + timeout_s, [], 0
        while part := await self.read(deadline - time.monotonic()):
            parts.append(part)
            num_bytes += len(part)
            if num_bytes > MAX_BODY_BYTES:
                raise ConnectionBroken(f"a response of more than {MAX_BODY_BYTES} bytes")
        return b"".join(parts)


class HttpClient(ABC):
    @abstractmethod
    def stream(
        self,
        method: str,
        path: str,
        body: bytes,
        *,
        timeout_s: float,
        connect_timeout_s: float,
        headers: Mapping[str, str] | None = None,
    ) -> AbstractAsyncContextManager[HttpResponse]:
        """Send a request when the block begins. `timeout_s` bounds the wait for the head and each read of the body.

        Leaving the block before the end of the body closes the connection. Raises `HttpClientError`, in the block too.
        """

    @abstractmethod
    async def aclose(self) -> None: ...


class HttpxClient(HttpClient):
    """Calls over httpx. `transport` replaces its sockets, for example by an ASGI application."""

    def __init__(self, url: str, headers: Mapping[str, str], transport: httpx.AsyncBaseTransport | None = None):
        self._http = httpx.AsyncClient(
            base_url=url,
            headers={"content-type": "application/json", **headers},
            transport=transport,
            verify=ssl.create_default_context() if url.startswith("https:") else False,
            limits=httpx.Limits(max_keepalive_connections=MAX_IDLE, keepalive_expiry=IDLE_S),
            trust_env=False,
        )

    @asynccontextmanager
    async def stream(
        self,
        method: str,
        path: str,
        body: bytes,
        *,
        timeout_s: float,
        connect_timeout_s: float,
        headers: Mapping[str, str] | None = None,
    ) -> AsyncIterator[HttpResponse]:
        timeout = httpx.Timeout(timeout_s, connect=connect_timeout_s)
        with _translated_errors():
            call = self._http.stream(method, path, content=body, headers=headers, timeout=timeout)
            async with AsyncExitStack() as stack:
                async with asyncio.timeout(timeout_s):  # a transport may ignore its own timeout
                    response = await stack.enter_async_context(call)
                yield HttpxResponse(response)

    async def aclose(self) -> None:
        with _translated_errors():
            await self._http.aclose()


class HttpxResponse(HttpResponse):
    def __init__(self, response: httpx.Response):
        self.status = response.status_code
        self.retry_after = response.headers.get("retry-after")
        self._parts = response.aiter_bytes()

    async def read(self, timeout_s: float | None = None) -> bytes:
        with _translated_errors():
            async with asyncio.timeout(timeout_s):
                return await anext(self._parts, b"")


@contextmanager
def _translated_errors() -> Iterator[None]:
    try:
        yield
    except httpx.InvalidURL as error:
        raise InvalidPath(str(error)) from error
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        raise ConnectFailed(repr(error)) from error
    except (httpx.TimeoutException, TimeoutError) as error:
        raise ReadTimeout(repr(error)) from error
    except httpx.HTTPError as error:
        raise ConnectionBroken(repr(error)) from error


class SocketClient(HttpClient):
    """Calls over sockets to the host and port of `url`. Certificates of `https` are verified with the system's
    authorities.

    A response needs a `content-length` or chunked encoding; one that ends by closing the connection counts as broken.
    """

    def __init__(self, url: str, headers: Mapping[str, str]):
        parts = urlsplit(url)
        self._host = parts.hostname or ""
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls else 80)
        self._base_path = parts.path.rstrip("/")
        host = parts.netloc.rpartition("@")[2]
        self._headers = _header_lines({"host": host, "content-type": "application/json", **headers})
        self._idle: deque[Connection] = deque()  # least recently used first
        self._open: set[Connection] = set()
        self._is_closed = False

    def stream(
        self,
        method: str,
        path: str,
        body: bytes,
        *,
        timeout_s: float,
        connect_timeout_s: float,
        headers: Mapping[str, str] | None = None,
    ) -> Exchange:
        if not PATH.fullmatch(path):
            raise InvalidPath(path)
        lines = self._headers + _header_lines(headers or {})
        head = f"{method} {self._base_path}{path} HTTP/1.1\r\n{lines}content-length: {len(body)}\r\n\r\n"
        return Exchange(self, head.encode("latin-1") + body, timeout_s, connect_timeout_s)

    async def aclose(self) -> None:
        self._is_closed = True
        self._idle.clear()
        connections = list(self._open)
        for connection in connections:
            connection.abort()
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await asyncio.gather(*(connection.closed.wait() for connection in connections))

    async def acquire(self, timeout_s: float) -> Connection:
        """Return an idle connection, the most recently used first, or a new one."""
        return self._usable_idle() or await self._connect(timeout_s)

    def release(self, connection: Connection) -> None:
        if connection.is_reusable and len(self._idle) < MAX_IDLE and not self._is_closed:
            connection.idle_since = time.monotonic()
            self._idle.append(connection)
        else:
            connection.abort()

    def _usable_idle(self) -> Connection | None:
        """Skip connections that the server has closed, or is about to close."""
        oldest = time.monotonic() - IDLE_S
        while self._idle and (self._idle[0].is_closed or self._idle[0].idle_since < oldest):
            self._idle.popleft().abort()
        while self._idle:
            connection = self._idle.pop()
            if not connection.has_pending_input:
                return connection
            connection.abort()
        return None

    async def _connect(self, timeout_s: float) -> Connection:
        connection = Connection(self._open)
        loop = asyncio.get_running_loop()
        try:
            async with _lenient_timeout(timeout_s):
                await loop.create_connection(lambda: connection, self._host, self._port, ssl=self._tls)
        except BaseException as error:
            connection.connection_lost(None)  # uvloop does not call it for a cancelled connect
            if isinstance(error, TimeoutError):
                raise ConnectFailed(f"no connection within {timeout_s:g} s") from error
            if isinstance(error, OSError):
                raise ConnectFailed(repr(error)) from error
            raise
        return connection


class Exchange(AbstractAsyncContextManager[HttpResponse]):
    """One request and its response. Holds a connection for the duration of the block."""

    def __init__(self, client: SocketClient, request: bytes, timeout_s: float, connect_timeout_s: float):
        self._client = client
        self._request = request
        self._timeout_s = timeout_s
        self._connect_timeout_s = connect_timeout_s

    async def __aenter__(self) -> HttpResponse:
        deadline = time.monotonic() + self._timeout_s
        self._connection = await self._client.acquire(self._connect_timeout_s)
        try:
            await self._connection.send(self._request, deadline, self._timeout_s)
        except BaseException:
            self._client.release(self._connection)
            raise
        return self._connection

    async def __aexit__(self, *error: object) -> None:
        self._client.release(self._connection)


@asynccontextmanager
async def _lenient_timeout(timeout_s: float) -> AsyncIterator[None]:
    """Raise `TimeoutError` after `timeout_s` and a few turns of the event loop.

    If the loop itself ran late, the extra turns let it process what arrived in time.
    """
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle
    async with asyncio.timeout(None) as limit:

        def expire(turns_left: int) -> None:
            nonlocal timer
            if turns_left:
                timer = loop.call_later(LATE_TURN_S, expire, turns_left - 1)
            else:
                limit.reschedule(loop.time())

        timer = loop.call_later(timeout_s, expire, LATE_TURNS)
        try:
            yield
        finally:
            timer.cancel()


class Connection(asyncio.Protocol, HttpResponse):
    """One connection, serving one call at a time, and the current response on it. Registered in `open_connections`
    while it is open."""

    def __init__(self, open_connections: set[Connection]):
        self.closed = asyncio.Event()
        self.idle_since = 0.0
        self._open_connections = open_connections
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._timeout_s = 0.0
        self._is_paused = False
        self._reset()

    def _reset(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self.status = 0
        self.retry_after = None
        self._has_head = self._is_complete = self._keeps_alive = False
        self._body: list[bytes] = []
        self._num_buffered_bytes = 0

    @property
    def is_closed(self) -> bool:
        return self.closed.is_set()

    @property
    def has_pending_input(self) -> bool:
        """Whether an idle connection is closed, or has input that the loop has not processed: most likely its end."""
        return self.is_closed or bool(self._poll.poll(0))

    @property
    def is_reusable(self) -> bool:
        return self._is_complete and not self._body and self._keeps_alive and not self.is_closed

    async def send(self, request: bytes, deadline: float, timeout_s: float) -> None:
        """Send the request and wait for the response head. `timeout_s` is the default of later reads."""
        self._reset()
        self._timeout_s = timeout_s
        self._transport.write(request)
        while not self._has_head:
            await self._wait(deadline)

    async def read(self, timeout_s: float | None = None) -> bytes:
        deadline = time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)
        while not self._body:
            if self._is_complete:
                return b""
            await self._wait(deadline)
        data = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._body.clear()
        self._num_buffered_bytes = 0
        if self._is_paused:
            self._is_paused = False
            self._transport.resume_reading()
        return data

    def abort(self) -> None:
        if not self.is_closed:
            self._transport.abort()

    async def _wait(self, deadline: float) -> None:
        """Wait until something arrives."""
        if self.is_closed:
            raise ConnectionBroken("the connection closed before the end of the response")
        self._waiter = self._loop.create_future()
        timer = self._loop.call_later(max(0.0, deadline - time.monotonic()), self._wake, ReadTimeout())
        try:
            await self._waiter
        finally:
            timer.cancel()
            self._waiter = None

    def _wake(self, error: HttpClientError | None = None) -> None:
        if self._waiter is None or self._waiter.done():
            return
        if error is None:
            self._waiter.set_result(None)
        else:
            self._waiter.set_exception(error)

    # Callbacks of asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport is not a subclass
        self._poll = select.poll()
        self._poll.register(transport.get_extra_info("socket").fileno(), select.POLLIN)
        self._open_connections.add(self)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._wake(ConnectionBroken(repr(error)))
            self.abort()
        else:
            self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        self.closed.set()
        self._open_connections.discard(self)
        self._wake()

    # Callbacks of httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"retry-after":
            self.retry_after = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self._keeps_alive = self._parser.should_keep_alive()  # known from here on only
        self._has_head = True

    def on_body(self, body: bytes) -> None:
        self._body.append(body)
        self._num_buffered_bytes += len(body)
        if self._num_buffered_bytes > MAX_BUFFERED_BYTES and not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        self._is_complete = True


def _header_lines(headers: Mapping[str, str]) -> str:
    return "".join(f"{name}: {value}\r\n" for name, value in headers.items())
