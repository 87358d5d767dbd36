"""A request's body: bounded in size and in time."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from starlette.types import Message, Receive

from workers.api.errors import RequestTooLarge, RequestTooSlow
from workers.api.http.errors import ClientDisconnected


def bounded(receive: Receive, max_bytes: int) -> Receive:
    """A `receive` that raises `RequestTooLarge` as soon as more than `max_bytes` of the body have arrived."""
    num_bytes = 0

    async def receive_bounded() -> Message:
        nonlocal num_bytes
        message = await receive()
        num_bytes += len(message.get("body", b""))
        if num_bytes > max_bytes:
            raise too_large(num_bytes, max_bytes)
        return message

    return receive_bounded


def too_large(num_bytes: int, max_bytes: int) -> RequestTooLarge:
    return RequestTooLarge(f"the body has at least {num_bytes} bytes; at most {max_bytes} are allowed")


async def read_body(receive: Receive, timeout_s: float | None) -> bytes:
    """The whole body. Raises `RequestTooSlow` after `timeout_s`, however steadily it trickles in, and
    `ClientDisconnected`."""
    if timeout_s is None:
        return await _read(receive)
    try:
        async with asyncio.timeout(timeout_s):
            return await _read(receive)
    except TimeoutError as error:
        raise RequestTooSlow(f"the body did not arrive within {timeout_s:g} s") from error


async def _read(receive: Receive) -> bytes:
    pieces: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected("the client hung up before its body had arrived")
        pieces.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(pieces)


def replayed(body: bytes, receive: Receive) -> Receive:
    """A `receive` that returns `body` first."""
    is_sent = False

    async def receive_replayed() -> Message:
        nonlocal is_sent
        if is_sent:
            return await receive()
        is_sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive_replayed


async def drop_body(receive: Receive, max_bytes: int, timeout_s: float) -> None:
    """Read and discard the rest of a body, up to `max_bytes` or `timeout_s`. A client whose connection closes while it
    sends is reset, and may never see its reply."""
    num_bytes = 0
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while num_bytes <= max_bytes:
                message = await receive()
                num_bytes += len(message.get("body", b""))
                if not message.get("more_body", False):
                    return
