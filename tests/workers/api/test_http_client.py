"""The HTTP clients of the worker API: the socket client, and httpx where both must behave alike."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
import uvloop

from workers.api.client import EventParser
from workers.api.http_client import (
    CLOSE_S,
    MAX_BUFFERED_BYTES,
    ConnectFailed,
    ConnectionBroken,
    HttpClient,
    HttpxClient,
    InvalidPath,
    ReadTimeout,
    SocketClient,
)

Reply = Callable[[asyncio.StreamWriter], Awaitable[None]]

JSON = b'{"a": 1}'
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 8\r\n\r\n" + JSON
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


@dataclass
class Server:
    """Answers every request with `reply`, and records the requests of each connection."""

    reply: Reply
    port: int = 0
    requests: list[list[bytes]] = field(default_factory=list)
    num_ended: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        own: list[bytes] = []
        self.requests.append(own)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
                own.append(head + await reader.readexactly(length))
                await self.reply(writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            self.num_ended += 1
        finally:
            writer.close()


BOTH = pytest.mark.parametrize("kind", [SocketClient, HttpxClient])


@asynccontextmanager
async def serving(reply: Reply, kind: Callable[..., Any] = SocketClient) -> AsyncIterator[tuple[Server, Any]]:
    server = Server(reply)
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    server.port = listener.sockets[0].getsockname()[1]
    client = kind(f"http://127.0.0.1:{server.port}/base", {"x-secret": "known"})
    try:
        yield server, client
    finally:
        await client.aclose()
        listener.close()


def sending(*pieces: bytes) -> Reply:
    async def reply(writer: asyncio.StreamWriter) -> None:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.01)

    return reply


def closing_after(*pieces: bytes) -> Reply:
    async def reply(writer: asyncio.StreamWriter) -> None:
        await sending(*pieces)(writer)
        writer.close()

    return reply


async def never(writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(60)


async def whole(
    client: HttpClient, timeout_s: float = 5.0, path: str = "/x", body: bytes = b"", connect_timeout_s: float = 1.0
) -> tuple[int, str | None, bytes]:
    async with client.stream("POST", path, body, timeout_s=timeout_s, connect_timeout_s=connect_timeout_s) as response:
        return response.status, response.retry_after, await response.read_all(timeout_s)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not holds():  # noqa: ASYNC110 - the other end of a socket sets it
            await asyncio.sleep(0.005)


def httpx_client(answer: httpx.Response | Exception) -> HttpxClient:
    def handle(request: httpx.Request) -> httpx.Response:
        if isinstance(answer, Exception):
            raise answer
        return answer

    return HttpxClient("http://worker", {}, httpx.MockTransport(handle))


@BOTH
async def test_request_is_sent_and_response_read(kind: Callable[..., HttpClient]) -> None:
    async with serving(sending(OK), kind) as (server, client):
        assert await whole(client, path="/v1/x", body=b"{}") == (200, None, JSON)
        head, _, body = server.requests[0][0].partition(b"\r\n\r\n")
        assert head.startswith(b"POST /base/v1/x HTTP/1.1\r\n") and body == b"{}"
        head = head.lower()
        assert b"\r\nx-secret: known" in head and f"\r\nhost: 127.0.0.1:{server.port}\r\n".encode() in head


async def test_both_clients_return_status_and_retry_after() -> None:
    busy = b"HTTP/1.1 503 Busy\r\nRetry-After: 2\r\ncontent-length: 0\r\n\r\n"
    async with serving(sending(busy)) as (_, client):
        over_httpx = httpx_client(httpx.Response(503, headers={"retry-after": "2"}))
        assert await whole(client) == await whole(over_httpx) == (503, "2", b"")
        await over_httpx.aclose()


@BOTH
async def test_body_is_read_as_it_arrives(kind: Callable[..., HttpClient]) -> None:
    async with serving(sending(CHUNKED + b"3\r\none\r\n", b"3\r\ntwo\r\n", b"0\r\n\r\n"), kind) as (_, client):
        async with client.stream("POST", "/x", b"", timeout_s=5, connect_timeout_s=1) as response:
            assert [await response.read() for _ in range(3)] == [b"one", b"two", b""]


@BOTH
async def test_read_timeout_overrides_call_timeout(kind: Callable[..., HttpClient]) -> None:
    async with serving(sending(CHUNKED + b"3\r\none\r\n"), kind) as (_, client):
        async with client.stream("POST", "/x", b"", timeout_s=30, connect_timeout_s=1) as response:
            assert await response.read() == b"one"
            with pytest.raises(ReadTimeout):
                await response.read(0.05)


async def test_connection_is_reused_one_call_at_a_time() -> None:
    async with serving(sending(OK)) as (server, client):
        await whole(client)
        await asyncio.gather(whole(client), whole(client))
        await whole(client)
        assert sorted(map(len, server.requests)) == [1, 3] or sorted(map(len, server.requests)) == [2, 2]


async def test_connection_closed_by_server_is_not_reused() -> None:
    async with serving(closing_after(OK)) as (server, client):
        for _ in range(3):
            assert (await whole(client))[2] == JSON
            await until(lambda: not client._open)
        assert list(map(len, server.requests)) == [1, 1, 1]


@BOTH
async def test_leaving_early_closes_connection(kind: Callable[..., HttpClient]) -> None:
    async with serving(sending(CHUNKED + b"3\r\none\r\n"), kind) as (server, client):
        async with client.stream("POST", "/x", b"", timeout_s=5, connect_timeout_s=1) as response:
            assert await response.read() == b"one"
        await until(lambda: server.num_ended == 1)


async def test_late_event_loop_is_not_a_connect_timeout() -> None:
    async with serving(sending(OK)) as (_, client):
        asking = asyncio.create_task(whole(client, connect_timeout_s=0.05))
        await asyncio.sleep(0)
        time.sleep(0.3)  # noqa: ASYNC251 - as hundreds of other requests would
        assert (await asking)[2] == JSON


@BOTH
async def test_cancellation_closes_connection(kind: Callable[..., HttpClient]) -> None:
    async with serving(sending(b""), kind) as (server, client):
        asking = asyncio.create_task(whole(client))
        await until(lambda: bool(server.requests and server.requests[0]))
        asking.cancel()
        await asyncio.wait({asking})
        await until(lambda: server.num_ended == 1)


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (closing_after(b""), ConnectionBroken),
        (closing_after(CHUNKED + b"3\r\none\r\n"), ConnectionBroken),
        (closing_after(b"HTTP/1.1 200 OK\r\n\r\nno length"), ConnectionBroken),
        (sending(b"SSH-2.0-server\r\n\r\n"), ConnectionBroken),
        (sending(CHUNKED + b"3\r\none\r\n"), ReadTimeout),
        (never, ReadTimeout),
    ],
)
async def test_incomplete_response_is_an_error(reply: Reply, error: type[Exception]) -> None:
    async with serving(reply) as (_, client):
        with pytest.raises(error):
            await whole(client, timeout_s=0.2)
        await until(lambda: not client._open)


async def test_refused_connection() -> None:
    async with serving(never) as (server, _):
        gone = SocketClient("http://127.0.0.1:1", {})
        with pytest.raises(ConnectFailed):
            await whole(gone)
    over_httpx = httpx_client(httpx.ConnectError("refused"))
    with pytest.raises(ConnectFailed):
        await whole(over_httpx)
    await over_httpx.aclose()


@pytest.mark.parametrize("path", ["x", "/a b", "/a\r\nhost: other", "/é"])
async def test_invalid_path_is_not_sent(path: str) -> None:
    async with serving(sending(OK)) as (server, client):
        with pytest.raises(InvalidPath):
            await whole(client, path=path)
        assert not server.requests


@BOTH
async def test_slow_reader_applies_backpressure(kind: Callable[..., HttpClient]) -> None:
    size = 64 * MAX_BUFFERED_BYTES
    head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size
    is_sent = False

    async def reply(writer: asyncio.StreamWriter) -> None:
        nonlocal is_sent
        writer.write(head + bytes(size))
        await writer.drain()
        is_sent = True

    async with serving(reply, kind) as (_, client):
        async with client.stream("POST", "/x", b"", timeout_s=5, connect_timeout_s=1) as response:
            await asyncio.sleep(0.2)
            assert not is_sent
            assert len(await response.read_all(10.0)) == size
        await until(lambda: is_sent)


async def test_closing_ends_running_calls() -> None:
    async with serving(never) as (server, client):
        asking = asyncio.create_task(whole(client))
        await until(lambda: bool(server.requests and server.requests[0]))
        await client.aclose()
        await asyncio.wait({asking})
        assert isinstance(asking.exception(), ConnectionBroken)


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_cancelled_connect_leaks_nothing(run: Callable[[Any], None]) -> None:
    async def cancelled_after(client: SocketClient, turns: int) -> None:
        call = asyncio.create_task(client.acquire(5.0))
        for _ in range(turns):
            await asyncio.sleep(0)
        call.cancel()
        with suppress(asyncio.CancelledError):
            (await call).abort()

    async def go() -> None:
        async with serving(sending(OK)) as (_, client):
            for turns in list(range(14)) * 3:
                await cancelled_after(client, turns)
            began = time.monotonic()
            await client.aclose()
            assert time.monotonic() - began < CLOSE_S / 2, "no connection is left to wait for"

    run(go())


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_events_are_parsed_however_they_are_split(size: int) -> None:
    stream = b': keep-alive\n\ndata: {"n": 1}\r\n\r\ndata: {"n": 2}\n\ndata: [DONE]\n\ndata: {"n": 3}\n\n'
    events = EventParser()
    chunks = [chunk for at in range(0, len(stream), size) for chunk in events.feed(stream[at : at + size])]
    assert chunks == [{"n": 1}, {"n": 2}] and events.is_done and events.error is None


@pytest.mark.parametrize(("frame", "code"), [(b"[]", "worker_unavailable"), (b'{"error": {"code": "x"}}', None)])
def test_chunks_before_an_error_are_returned_first(frame: bytes, code: str | None) -> None:
    events = EventParser()
    assert events.feed(b'data: {"n": 1}\ndata: ' + frame + b'\ndata: {"n": 2}\n') == [{"n": 1}]
    assert events.error is not None and not events.is_done
    assert code is None or events.error.code == code
