"""The load: chat requests over kept connections, from a client that is cheap compared with the gateways.

closed   a number of connections, each sending its next request at once: maximum throughput
paced    a constant rate, whatever the answers: added latency
streams  a number of concurrent streams, each read to its end
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import cast

import httptools
import orjson

SYSTEM = "You answer briefly, and only from what you were told. " * 20
DONE = b"data: [DONE]"
TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Target:
    """A server of the OpenAI API on the loopback."""

    port: int
    key: str
    model: str

    def request(self, number: int, *, num_words: int, every_ms: int = 0, stream: bool = False) -> bytes:
        """Return a whole HTTP request. `number` makes its prompt unique, after a prefix that all share."""
        question = f"Question {number}: Say {num_words} words, one every {every_ms} ms."
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
        body = orjson.dumps({"model": self.model, "messages": messages, "max_tokens": 4096, "stream": stream})
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:{self.port}\r\nauthorization: Bearer {self.key}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


@dataclass
class LoadResult:
    """The results of many requests. `errors` counts answers with another status than 200, broken or missing ones."""

    seconds: float = 0.0
    latencies_ms: list[float] = field(default_factory=list)
    errors: int = 0

    @property
    def num_answered(self) -> int:
        return len(self.latencies_ms)

    @property
    def per_s(self) -> float:
        return self.num_answered / self.seconds if self.seconds else 0.0

    def percentile_ms(self, percent: int) -> float | None:
        if len(self.latencies_ms) < 2:
            return None
        return statistics.quantiles(self.latencies_ms, n=100, method="inclusive")[percent - 1]

    def add(self, other: LoadResult) -> None:
        self.seconds += other.seconds
        self.latencies_ms += other.latencies_ms
        self.errors += other.errors


class Connection(asyncio.Protocol):
    """One kept connection, for one request at a time."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._body: list[bytes] = []
        self._answered: asyncio.Future[bytes] | None = None
        self._transport: asyncio.Transport | None = None
        self.is_open = False

    async def ask(self, request: bytes) -> bytes:
        """Send a request and return the body. Raises `OSError` for a status other than 200, or a broken connection."""
        assert self._transport is not None
        self._answered = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._answered

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport, self.is_open = cast(asyncio.Transport, transport), True  # uvloop's transport is not a subclass

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        self._end(ConnectionError("the connection ended"))

    def on_message_begin(self) -> None:
        self._body = []

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        status, body = self._parser.get_status_code(), b"".join(self._body)
        self._end(body if status == 200 else OSError(f"{status}: {body[:200]!r}"))

    def _end(self, end: bytes | OSError) -> None:
        answered, self._answered = self._answered, None
        if answered is None or answered.done():
            return
        if isinstance(end, bytes):
            answered.set_result(end)
        else:
            answered.set_exception(end)


class Pool:
    """Connections to one port, opened on demand and kept."""

    def __init__(self, port: int):
        self._port = port
        self._idle: list[Connection] = []

    async def ask(self, request: bytes, timeout_s: float = TIMEOUT_S) -> bytes:
        """Like `Connection.ask`; also raises `TimeoutError`."""
        connection = await self._connection()
        try:
            async with asyncio.timeout(timeout_s):
                body = await connection.ask(request)
        except BaseException:
            connection.close()
            raise
        self._idle.append(connection)
        return body

    def close(self) -> None:
        for connection in self._idle:
            connection.close()

    async def _connection(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        _, connection = await asyncio.get_running_loop().create_connection(Connection, "127.0.0.1", self._port)
        return connection


class Load:
    """Sends requests to one target, and measures the answers."""

    def __init__(self, target: Target, *, num_words: int):
        self._target = target
        self._num_words = num_words
        self._numbers: Iterator[int] = itertools.count()

    async def closed(self, num_requests: int, *, num_connections: int) -> LoadResult:
        remaining = iter(range(num_requests))
        async with self._measured() as (pool, outcome):

            async def repeat() -> None:
                for _ in remaining:
                    await self._ask(pool, self._request(), outcome)

            await asyncio.gather(*(repeat() for _ in range(num_connections)))
        return outcome

    async def paced(self, per_s: float, seconds: float) -> LoadResult:
        """Send at a constant rate without waiting for answers. Latency counts from when a request was due."""
        loop = asyncio.get_running_loop()
        async with self._measured() as (pool, outcome):
            began, tasks = loop.time(), []
            for index in range(int(per_s * seconds)):
                due = began + index / per_s
                await asyncio.sleep(due - loop.time())
                tasks.append(loop.create_task(self._ask(pool, self._request(), outcome, due)))
            await asyncio.gather(*tasks)
        return outcome

    async def streams(self, num_streams: int, *, num_words: int, every_ms: int) -> LoadResult:
        """Start all streams at once. An incomplete one is an error."""
        requests = [
            self._target.request(next(self._numbers), num_words=num_words, every_ms=every_ms, stream=True)
            for _ in range(num_streams)
        ]
        async with self._measured() as (pool, outcome):
            await asyncio.gather(*(self._ask(pool, one, outcome, num_words=num_words) for one in requests))
        return outcome

    def _request(self) -> bytes:
        return self._target.request(next(self._numbers), num_words=self._num_words)

    async def _ask(
        self, pool: Pool, request: bytes, outcome: LoadResult, since: float | None = None, num_words: int | None = None
    ) -> None:
        loop = asyncio.get_running_loop()
        since = since or loop.time()
        try:
            body = await pool.ask(request)
        except (OSError, TimeoutError):
            outcome.errors += 1
            return
        if num_words is not None and not is_whole_stream(body, num_words):
            outcome.errors += 1
            return
        outcome.latencies_ms.append((loop.time() - since) * 1000)

    @asynccontextmanager
    async def _measured(self) -> AsyncIterator[tuple[Pool, LoadResult]]:
        pool, outcome, began = Pool(self._target.port), LoadResult(), time.monotonic()
        try:
            yield pool, outcome
        finally:
            outcome.seconds = time.monotonic() - began
            pool.close()


def is_whole_stream(body: bytes, num_words: int) -> bool:
    """Whether the stream has all words and the end."""
    return body.count(b'"content":"word "') + body.count(b'"content": "word "') == num_words and DONE in body
