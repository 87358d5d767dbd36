"""The HTTP of a worker's client: over sockets, and over an httpx transport where both must do the same."""

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

from workers.api.client import Frames
from workers.api.http_client import (
    CLOSE_S,
    MAX_UNREAD_BYTES,
    BadPath,
    BrokenOff,
    HttpxWire,
    Silent,
    SocketWire,
    Unreachable,
    Wire,
)

Reply = Callable[[asyncio.StreamWriter], Awaitable[None]]

JSON = b'{"a": 1}'
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 8\r\n\r\n" + JSON
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


@dataclass
class Server:
    """Answers every request with `reply`, and knows what it was sent, by connection."""

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


@asynccontextmanager
async def serving(reply: Reply) -> AsyncIterator[tuple[Server, SocketWire]]:
    server = Server(reply)
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    server.port = listener.sockets[0].getsockname()[1]
    wire = SocketWire(f"http://127.0.0.1:{server.port}/base", {"x-secret": "known"})
    try:
        yield server, wire
    finally:
        await wire.aclose()
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
    wire: Wire, timeout_s: float = 5.0, path: str = "/x", body: bytes = b"", connect_s: float = 1.0
) -> tuple[int, str | None, bytes]:
    async with wire.ask("POST", path, body, timeout_s=timeout_s, connect_s=connect_s) as answer:
        return answer.status, answer.retry_after, await answer.whole(10.0)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not holds():  # noqa: ASYNC110 - the other end of a socket sets it
            await asyncio.sleep(0.005)


def httpx_wire(answer: httpx.Response | Exception) -> HttpxWire:
    def handle(request: httpx.Request) -> httpx.Response:
        if isinstance(answer, Exception):
            raise answer
        return answer

    return HttpxWire("http://worker", {}, httpx.MockTransport(handle))


async def test_a_request_is_sent_whole_and_its_answer_read() -> None:
    async with serving(sending(OK)) as (server, wire):
        assert await whole(wire, path="/v1/x", body=b"{}") == (200, None, JSON)
        head, _, body = server.requests[0][0].partition(b"\r\n\r\n")
        assert head.startswith(b"POST /base/v1/x HTTP/1.1\r\n") and body == b"{}"
        assert b"\r\nx-secret: known" in head and f"\r\nhost: 127.0.0.1:{server.port}\r\n".encode() in head


async def test_both_wires_tell_status_and_when_to_come_again() -> None:
    busy = b"HTTP/1.1 503 Busy\r\nRetry-After: 2\r\ncontent-length: 0\r\n\r\n"
    async with serving(sending(busy)) as (_, wire):
        over_httpx = httpx_wire(httpx.Response(503, headers={"retry-after": "2"}))
        assert await whole(wire) == await whole(over_httpx) == (503, "2", b"")
        await over_httpx.aclose()


async def test_a_body_is_read_as_it_comes() -> None:
    async with serving(sending(CHUNKED + b"3\r\none\r\n", b"3\r\ntwo\r\n", b"0\r\n\r\n")) as (_, wire):
        async with wire.ask("POST", "/x", b"", timeout_s=5, connect_s=1) as answer:
            assert [await answer.read() for _ in range(3)] == [b"one", b"two", b""]


async def test_one_read_may_have_less_time_than_the_call() -> None:
    async with serving(sending(CHUNKED + b"3\r\none\r\n")) as (_, wire):
        async with wire.ask("POST", "/x", b"", timeout_s=30, connect_s=1) as answer:
            assert await answer.read() == b"one"
            with pytest.raises(Silent):
                await answer.read(0.05)


async def test_a_connection_is_kept_and_serves_one_call_at_a_time() -> None:
    async with serving(sending(OK)) as (server, wire):
        await whole(wire)
        await asyncio.gather(whole(wire), whole(wire))
        await whole(wire)
        assert sorted(map(len, server.requests)) == [1, 3] or sorted(map(len, server.requests)) == [2, 2]


async def test_one_that_the_worker_has_closed_is_not_used_again() -> None:
    async with serving(closing_after(OK)) as (server, wire):
        for _ in range(3):
            assert (await whole(wire))[2] == JSON
            await until(lambda: not wire._open)
        assert list(map(len, server.requests)) == [1, 1, 1]


async def test_leaving_early_hangs_up() -> None:
    async with serving(sending(CHUNKED + b"3\r\none\r\n")) as (server, wire):
        async with wire.ask("POST", "/x", b"", timeout_s=5, connect_s=1) as answer:
            assert await answer.read() == b"one"
        await until(lambda: server.num_ended == 1)


async def test_a_loop_that_is_late_blames_nobody() -> None:
    async with serving(sending(OK)) as (_, wire):
        asking = asyncio.create_task(whole(wire, connect_s=0.05))
        await asyncio.sleep(0)
        time.sleep(0.3)  # noqa: ASYNC251 - as hundreds of other requests would
        assert (await asking)[2] == JSON


async def test_being_cancelled_hangs_up() -> None:
    async with serving(sending(b"")) as (server, wire):
        asking = asyncio.create_task(whole(wire))
        await until(lambda: bool(server.requests and server.requests[0]))
        asking.cancel()
        await asyncio.wait({asking})
        await until(lambda: server.num_ended == 1)


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (closing_after(b""), BrokenOff),
        (closing_after(CHUNKED + b"3\r\none\r\n"), BrokenOff),
        (closing_after(b"HTTP/1.1 200 OK\r\n\r\nno length"), BrokenOff),
        (sending(b"SSH-2.0-server\r\n\r\n"), BrokenOff),
        (sending(CHUNKED + b"3\r\none\r\n"), Silent),
        (never, Silent),
    ],
)
async def test_what_is_no_whole_answer_is_an_error(reply: Reply, error: type[Exception]) -> None:
    async with serving(reply) as (_, wire):
        with pytest.raises(error):
            await whole(wire, timeout_s=0.2)
        await until(lambda: not wire._open)


async def test_nobody_there() -> None:
    async with serving(never) as (server, _):
        gone = SocketWire("http://127.0.0.1:1", {})
        with pytest.raises(Unreachable):
            await whole(gone)
    over_httpx = httpx_wire(httpx.ConnectError("refused"))
    with pytest.raises(Unreachable):
        await whole(over_httpx)
    await over_httpx.aclose()


@pytest.mark.parametrize("path", ["x", "/a b", "/a\r\nhost: other", "/é"])
async def test_a_path_that_http_cannot_carry_is_not_sent(path: str) -> None:
    async with serving(sending(OK)) as (server, wire):
        with pytest.raises(BadPath):
            await whole(wire, path=path)
        assert not server.requests


async def test_who_reads_slowly_makes_the_worker_wait() -> None:
    size = 64 * MAX_UNREAD_BYTES
    head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size
    is_sent = False

    async def reply(writer: asyncio.StreamWriter) -> None:
        nonlocal is_sent
        writer.write(head + bytes(size))
        await writer.drain()
        is_sent = True

    async with serving(reply) as (_, wire):
        async with wire.ask("POST", "/x", b"", timeout_s=5, connect_s=1) as answer:
            await asyncio.sleep(0.2)
            assert not is_sent
            assert len(await answer.whole(10.0)) == size
        await until(lambda: is_sent)


async def test_closing_ends_calls_under_way() -> None:
    async with serving(never) as (server, wire):
        asking = asyncio.create_task(whole(wire))
        await until(lambda: bool(server.requests and server.requests[0]))
        await wire.aclose()
        await asyncio.wait({asking})
        assert isinstance(asking.exception(), BrokenOff)


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_being_cancelled_while_connecting_leaves_nothing(run: Callable[[Any], None]) -> None:
    async def cancelled_after(wire: SocketWire, turns: int) -> None:
        call = asyncio.create_task(wire.connection(5.0))
        for _ in range(turns):
            await asyncio.sleep(0)
        call.cancel()
        with suppress(asyncio.CancelledError):
            (await call).hang_up()

    async def go() -> None:
        async with serving(sending(OK)) as (_, wire):
            for turns in list(range(14)) * 3:
                await cancelled_after(wire, turns)
            began = time.monotonic()
            await wire.aclose()
            assert time.monotonic() - began < CLOSE_S / 2, "it waits for nobody"

    run(go())


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_frames_are_put_together_however_they_are_cut(size: int) -> None:
    stream = b': keep-alive\n\ndata: {"n": 1}\r\n\r\ndata: {"n": 2}\n\ndata: [DONE]\n\ndata: {"n": 3}\n\n'
    frames = Frames()
    chunks = [chunk for at in range(0, len(stream), size) for chunk in frames.add(stream[at : at + size])]
    assert chunks == [{"n": 1}, {"n": 2}] and frames.are_whole and frames.error is None


@pytest.mark.parametrize(("frame", "code"), [(b"[]", "worker_unavailable"), (b'{"error": {"code": "x"}}', None)])
def test_what_comes_before_an_error_is_told_first(frame: bytes, code: str | None) -> None:
    frames = Frames()
    assert frames.add(b'data: {"n": 1}\ndata: ' + frame + b'\ndata: {"n": 2}\n') == [{"n": 1}]
    assert frames.error is not None and not frames.are_whole
    assert code is None or frames.error.code == code
