"""Raw bytes over a real socket: bounds on size and time, and disconnects."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import orjson
import pytest

from tests.gateway.stack import MESSAGES, Stack, eventually, live_stack

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"
LIVEZ = b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n"
BODY = orjson.dumps({"model": "large", "messages": MESSAGES})
CHAT = HEAD + b"content-length: %d\r\n\r\n" % len(BODY) + BODY

Sockets = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    deadlines = {"request_s": 10.0, "decode_reserve_s": 0.5, "body_s": 0.4}
    async with live_stack(deadlines=deadlines, limits={"max_body_bytes": 100_000}) as stack:
        yield stack


@asynccontextmanager
async def connected(stack: Stack) -> AsyncIterator[Sockets]:
    host, port = stack.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.close()


async def bytes_accepted(writer: asyncio.StreamWriter, piece: bytes, max_bytes: int = 64 * 2**20) -> int:
    """Number of bytes of endless pieces that the gateway accepted before it closed; `max_bytes` if it never did."""
    num_bytes = 0
    try:
        while num_bytes < max_bytes:
            writer.write(piece)
            await writer.drain()
            num_bytes += len(piece)
    except ConnectionError:
        pass
    return num_bytes


async def answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of the next reply."""
    lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines[1:] if line)
    return int(lines[0].split()[1]), headers, await reader.readexactly(int(headers["content-length"]))


async def refused(reader: asyncio.StreamReader) -> tuple[int, str]:
    """Status and code of a reply after which the connection is closed."""
    status, headers, body = await answer(reader)
    assert headers["connection"] == "close"
    assert headers["x-request-id"]
    with suppress(ConnectionResetError):  # a client that still sends meets a closed connection
        assert await reader.read() == b"", "closed"
    return status, json.loads(body)["error"]["code"]


@pytest.mark.parametrize(
    ("begun", "piece"),
    [(HEAD, b"x: %s\r\n"), (HEAD + b"x: ", b"%s"), (b"GET /", b"%s")],
    ids=["headers", "header", "url"],
)
async def test_endless_head_is_not_buffered(stack: Stack, begun: bytes, piece: bytes) -> None:
    async with connected(stack) as (_, writer):
        writer.write(begun)
        assert await bytes_accepted(writer, piece % (b"a" * 65_000)) < 16 * 2**20


async def test_oversized_head_is_a_431(stack: Stack) -> None:
    async with connected(stack) as (reader, writer):
        for piece in (b"GET /", b"a" * 10_000, b"a" * 10_000):
            writer.write(piece)
            await asyncio.sleep(0.05)
        assert await refused(reader) == (431, "headers_too_large")
    assert stack.metric("requests_total", model="none", status="431") == 1
    assert (await stack.http.get("/v1/" + "a" * 20_000)).status_code == 431, "whole, in one piece"


@pytest.mark.parametrize("before", [b"", LIVEZ], ids=["first", "later"])
@pytest.mark.parametrize("drip", [b"a: b\r\n", b"\r\n"], ids=["headers", "nothing"])
async def test_head_that_trickles_in_is_a_408(stack: Stack, before: bytes, drip: bytes) -> None:
    async with connected(stack) as (reader, writer):
        if before:
            writer.write(before)
            assert (await answer(reader))[0] == 200
        if drip.strip():
            writer.write(HEAD)
        dripping = asyncio.create_task(dripped(writer, drip))
        async with asyncio.timeout(5):
            assert await refused(reader) == (408, "request_timeout")
        dripping.cancel()


async def dripped(writer: asyncio.StreamWriter, drip: bytes) -> None:
    while True:
        writer.write(drip)
        await asyncio.sleep(0.05)


async def test_head_in_pieces_within_its_time_is_accepted(stack: Stack) -> None:
    async with connected(stack) as (reader, writer):
        for _ in range(3):
            writer.write(LIVEZ[:20])
            await asyncio.sleep(0.02)
            writer.write(LIVEZ[20:])
            assert (await answer(reader))[0] == 200
        await asyncio.sleep(0.6)  # longer than a head may take
        writer.write(LIVEZ)
        assert (await answer(reader))[0] == 200, "idle is not late"


async def test_input_that_is_not_http_is_a_400(stack: Stack) -> None:
    async with connected(stack) as (reader, writer):
        writer.write(b"hello\r\n\r\n")
        assert await refused(reader) == (400, "invalid_request")


async def test_slow_body_closes_the_connection(stack: Stack) -> None:
    async with connected(stack) as (reader, writer):
        writer.write(HEAD + b"content-length: 1000\r\n\r\n{")
        assert await refused(reader) == (408, "request_timeout")


async def test_oversized_body_closes_the_connection(stack: Stack) -> None:
    piece = b"10000\r\n" + b"x" * 65_536 + b"\r\n"
    async with connected(stack) as (reader, writer):
        writer.write(CHUNKED + 2 * piece)
        assert await refused(reader) == (413, "request_too_large")
    async with connected(stack) as (_, writer):
        writer.write(CHUNKED)
        assert await bytes_accepted(writer, piece) < 16 * 2**20


async def test_unauthenticated_body_is_dropped_and_not_awaited() -> None:
    async with live_stack(tenants={"default": {"api_keys": ["0" * 64]}}) as stack:
        async with connected(stack) as (reader, writer):
            writer.write(HEAD + b"content-length: 300000\r\n\r\n")
            await asyncio.sleep(0.1)
            writer.write(b"x" * 300_000)
            status, headers, _ = await answer(reader)
            assert (status, headers.get("connection")) == (401, None), "the body was read to its end"
            writer.write(CHUNKED)
            assert await refused(reader) == (401, "invalid_api_key")


async def test_reply_does_not_wait_for_an_unused_body(stack: Stack) -> None:
    async with connected(stack) as (reader, writer):
        writer.write(LIVEZ.replace(b"host: x", b"host: x\r\ncontent-length: 9000"))
        status, headers, _ = await answer(reader)
        assert (status, headers["connection"]) == (200, "close")
        assert await reader.read() == b""


@pytest.mark.parametrize("next_request", [LIVEZ, LIVEZ[:10], CHAT, b"\0"], ids=["whole", "part", "body", "garbage"])
@pytest.mark.parametrize("together", [True, False])
async def test_pipelined_request_is_ignored(stack: Stack, next_request: bytes, together: bool) -> None:
    stack.large.delay("chat", 0.3)
    async with connected(stack) as (reader, writer):
        writer.write(CHAT + next_request if together else CHAT)
        if not together:
            await eventually(lambda: bool(stack.large.requests("chat")))
            writer.write(next_request)
        status, headers, _ = await answer(reader)
        assert (status, headers["connection"]) == (200, "close"), "the client knows that the other request was ignored"
        assert await reader.read() == b""


async def test_disconnect_is_noticed_behind_a_pipelined_request(stack: Stack) -> None:
    stack.large.delay("chat", 30.0)
    async with connected(stack) as (_, writer):
        writer.write(CHAT + LIVEZ)
        await eventually(lambda: bool(stack.large.requests("chat")))
    await eventually(lambda: stack.large.num_disconnects == 1, within_s=1.0)


async def test_pipelined_input_is_bounded(stack: Stack) -> None:
    stack.large.delay("chat", 30.0)
    async with connected(stack) as (_, writer):
        writer.write(CHAT + LIVEZ)
        assert await bytes_accepted(writer, b"x" * 65_536) < 16 * 2**20
    await eventually(lambda: stack.large.num_disconnects == 1)


@pytest.mark.parametrize("name", [b"Upgrade", b"upgrade"])
@pytest.mark.parametrize("pause_s", [0.0, 0.1])
async def test_upgrade_offer_is_ignored(stack: Stack, name: bytes, pause_s: float) -> None:
    """Java's HTTP client sends it with every request over plain HTTP."""
    offer = b"connection: Upgrade, HTTP2-Settings\r\n" + name + b": h2c\r\nhttp2-settings: AAMAAABk\r\n"
    head = HEAD + offer + b"content-length: %d\r\n\r\n" % len(BODY)
    async with connected(stack) as (reader, writer):
        for _ in range(2):
            writer.write(head)
            await asyncio.sleep(pause_s)
            writer.write(BODY)
            assert (await answer(reader))[0] == 200


@pytest.mark.parametrize("line", [b"CONNECT a:443", b"GET http://a:99999999/livez", b"GET http:///livez"])
@pytest.mark.parametrize("num_before", [0, 1])
async def test_request_without_a_path_is_a_400(stack: Stack, line: bytes, num_before: int) -> None:
    records: list[logging.LogRecord] = []
    watching = logging.Handler(logging.ERROR)
    watching.emit = records.append  # type: ignore[method-assign, assignment]
    logging.getLogger("asyncio").addHandler(watching)
    try:
        async with connected(stack) as (reader, writer):
            for _ in range(num_before):
                writer.write(LIVEZ)
                assert (await answer(reader))[0] == 200
            writer.write(line + b" HTTP/1.1\r\nhost: x\r\n\r\n")
            assert (await answer(reader))[0] == 400
            assert await reader.read() == b""
    finally:
        logging.getLogger("asyncio").removeHandler(watching)
    assert records == []
