"""A client that hangs up stops the worker in every phase of a request, and is counted by phase."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress
from typing import Any

import httpx
import orjson
import pytest

from tests.gateway.stack import MESSAGES, Stack, eventually, live_stack, right_answer, text
from tools.fake_worker import FakeWorker
from workers.api.http import disconnect
from workers.api.http.disconnect import DisconnectWatch
from workers.api.http.errors import ClientDisconnected

TCP_ESTABLISHED = 1
STALLING = {"request_s": 60.0, "client_stall_s": 0.3}
MUCH = " ".join(["x" * 200_000] * 100)  # more than all buffers on the way hold


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    async with live_stack() as stack:
        stack.small.logprob = -2.0
        yield stack


@pytest.fixture
async def stalling() -> AsyncIterator[Stack]:
    """The large model's answer is long, and a client may stall for 0.3 s only."""
    async with live_stack(deadlines=STALLING) as stack:
        stack.large.answer = MUCH
        yield stack


async def hang_up_once_called(stack: Stack, worker: FakeWorker, call: str, **fields: Any) -> None:
    """Send a request and close the connection as soon as the worker has received the call."""
    async with httpx.AsyncClient(base_url=stack.url) as client:
        body = {"model": "auto", "messages": MESSAGES} | fields
        task = asyncio.create_task(client.post("/v1/chat/completions", json=body))
        await eventually(lambda: bool(worker.requests(call)))
        task.cancel()
        await asyncio.wait({task})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("worker", "call", "phase"),
    [
        ("small", "prefill", "small_prefill"),
        ("small", "cached_chat", "small_answer"),
        ("large", "transfer", "transfer"),
        ("large", "cached_chat", "large_answer"),
    ],
)
async def test_disconnect_cancels_the_call_in_flight(
    stack: Stack, worker: str, call: str, phase: str, stream: bool
) -> None:
    called: FakeWorker = getattr(stack, worker)
    called.delay(call, 30.0)
    await hang_up_once_called(stack, called, call, stream=stream)
    await eventually(lambda: called.num_disconnects == 1)
    await eventually(lambda: stack.metric("client_disconnects_total", phase=phase) == 1)
    called.heal()
    assert text(await stack.chat()) == right_answer(stack.large, MESSAGES), "everything was released"
    assert stack.metric("num_requests_running", tier="small") == stack.metric("num_requests_running", tier="large") == 0


async def test_disconnect_during_the_body(stack: Stack) -> None:
    """It is counted as a disconnect, not as an internal error."""
    url = httpx.URL(stack.url)
    _, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: gateway\r\ncontent-length: 999\r\n\r\n{")
    await writer.drain()
    await asyncio.sleep(0.05)
    writer.close()
    await eventually(lambda: stack.metric("client_disconnects_total", phase="body") == 1)
    await eventually(lambda: stack.metric("requests_total", model="none", status="499") == 1)


@pytest.mark.parametrize("call", ["chat", "cached_chat"])
async def test_disconnect_during_a_stream_stops_the_model(stack: Stack, call: str) -> None:
    stack.large.answer = " ".join(["word"] * 500)
    stack.large.token_s = 0.02
    fields: dict[str, Any] = {"model": "large"} if call == "chat" else {}
    body = {"model": "auto", "messages": MESSAGES, "stream": True} | fields
    async with httpx.AsyncClient(base_url=stack.url) as client:
        async with client.stream("POST", "/v1/chat/completions", json=body) as reply:
            async for line in reply.aiter_lines():
                if "word" in line:
                    break
    await eventually(lambda: stack.large.num_disconnects == 1)
    await eventually(lambda: stack.metric("client_disconnects_total", phase="stream") == 1)
    await eventually(lambda: stack.metric("num_requests_running", tier="large") == 0)


async def test_client_that_stalls_in_a_stream_is_disconnected(stalling: Stack) -> None:
    async with raw_post(stalling, chat_body(stream=True)) as (_, writer):
        await eventually(lambda: stalling.metric("client_disconnects_total", phase="stream") == 1, within_s=10)
        await eventually(lambda: stalling.metric("num_requests_running", tier="large") == 0)
        await eventually(lambda: not is_established(writer))


async def test_client_that_stalls_in_a_whole_answer_is_disconnected(stalling: Stack) -> None:
    async with raw_post(stalling, chat_body(stream=False)) as (_, writer):
        await eventually(lambda: stalling.metric("requests_total", model="large", status="200") == 1, within_s=10)
        assert is_established(writer)
        await eventually(lambda: not is_established(writer))


async def test_client_that_stalls_gets_no_new_stream(stalling: Stack) -> None:
    """Its second request comes over a connection whose first reply it has not read."""
    async with raw_post(stalling, chat_body(stream=False)) as (_, writer):
        await eventually(lambda: stalling.metric("requests_total", model="large", status="200") == 1, within_s=10)
        stalling.large.answer = "word"
        writer.write(head(stalling, len(chat_body(stream=True))) + chat_body(stream=True))
        await eventually(lambda: stalling.metric("client_disconnects_total", phase="stream") == 1, within_s=10)
        await eventually(lambda: stalling.metric("num_requests_running", tier="large") == 0)


async def test_slow_client_gets_its_whole_answer(stalling: Stack) -> None:
    async with raw_post(stalling, chat_body(stream=False)) as (reader, _):
        response_head = await reader.readuntil(b"\r\n\r\n")
        left = int(response_head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        while left:
            await asyncio.sleep(STALLING["client_stall_s"] / 10)
            left -= len(await reader.readexactly(min(left, 2_000_000)))


async def test_body_that_never_arrives_is_a_408() -> None:
    async with live_stack(deadlines={"request_s": 60.0, "body_s": 0.3}) as stack:
        async with raw_post(stack, b'{"model": ', declared=1000) as (reader, _):
            head = await asyncio.wait_for(reader.readuntil(b"\r\n"), 10)
            assert b" 408 " in head


@asynccontextmanager
async def raw_post(
    stack: Stack, body: bytes, *, declared: int | None = None
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Send a request by hand, and read nothing of the reply."""
    url = httpx.URL(stack.url)
    reader, writer = await asyncio.open_connection(url.host, url.port, limit=1024)
    writer.write(head(stack, len(body) if declared is None else declared) + body)
    try:
        yield reader, writer
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


def head(stack: Stack, num_bytes: int) -> bytes:
    return f"POST /v1/chat/completions HTTP/1.1\r\nhost: {stack.url}\r\ncontent-length: {num_bytes}\r\n\r\n".encode()


def chat_body(*, stream: bool) -> bytes:
    return orjson.dumps({"model": "large", "messages": MESSAGES, "stream": stream})


def is_established(writer: asyncio.StreamWriter) -> bool:
    """The state of the connection in the kernel, tcp(7), whether or not the reply has been read."""
    state: bytes = writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
    return state[0] == TCP_ESTABLISHED


async def never() -> Any:
    await asyncio.Event().wait()


async def test_disconnect_cancels_only_the_guarded_block() -> None:
    events: list[str] = []
    gone = asyncio.Event()

    async def receive() -> dict[str, Any]:
        await gone.wait()
        return {"type": "http.disconnect"}

    async def work() -> None:
        events.append("begun")
        try:
            await never()
        finally:
            await asyncio.sleep(0)
            events.append("cleaned up")

    with closing(DisconnectWatch(receive, lambda: events.append("disconnect"))) as watch:
        with watch.guard():
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await work()
        asyncio.get_running_loop().call_soon(gone.set)
        for _ in range(2):
            with pytest.raises(ClientDisconnected):
                with watch.guard():
                    await work()
    assert events == ["begun", "cleaned up"] * 2 + ["disconnect"] * 2, "nothing begins after the disconnect"
    current = asyncio.current_task()
    assert current is not None and not current.cancelling()


async def test_cancellation_from_elsewhere_is_not_a_disconnect() -> None:
    disconnects: list[None] = []

    async def guarded() -> None:
        with closing(DisconnectWatch(never, lambda: disconnects.append(None))) as watch:
            with watch.guard():
                await never()

    task = asyncio.create_task(guarded())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled() and disconnects == []


async def test_swallowed_cancellation_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disconnect, "CANCEL_AGAIN_S", 0.01)
    num_swallowed = 0

    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    with closing(DisconnectWatch(receive, lambda: None)) as watch:
        with pytest.raises(ClientDisconnected), watch.guard():
            while num_swallowed < 2:
                try:
                    await never()
                except asyncio.CancelledError:
                    num_swallowed += 1
            await never()
    current = asyncio.current_task()
    assert current is not None and not current.cancelling()


async def test_disconnects_do_not_open_the_circuit(stack: Stack) -> None:
    stack.large.delay("chat", 30.0)
    for expected in range(1, 7):
        stack.large.calls.clear()
        await hang_up_once_called(stack, stack.large, "chat", model="large")
        await eventually(lambda expected=expected: stack.large.num_disconnects == expected)  # type: ignore[misc]
    assert stack.metric("circuit_state", target="large-0") == 0
    stack.large.heal()
    assert (await stack.chat(model="large")).status_code == 200
