"""CPU and wall time per upstream call: our socket client beside httpx and aiohttp, against one stub server.

    python -m benchmarks.upstream --json upstream.json

    this process   round 1: socket, httpx, aiohttp    round 2: httpx, aiohttp, socket    ...
    stub process   answers every call at once, whole or as a stream

Every call posts a chat request and reads the whole response, as the gateway does for each request. The clients take
turns, so that a change in the machine's speed affects all of them. Reported are medians over the rounds. aiohttp takes
part only if it is installed. The full run takes about half a minute.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import importlib.util
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import orjson
import uvloop

from benchmarks.gateways.processes import DidNotStart, free_port, running
from tools import measuring
from tools.output import add_json_option, render, run_command, write_json
from workers.api.http_client import HttpClient, HttpxClient, SocketClient

PATH = "/v1/chat/completions"
TIMEOUT_S = 30.0
WARM_UP_CALLS = 50

Call = Callable[[bytes], Awaitable[bytes]]


@dataclass(frozen=True)
class Row:
    """One round of one client. Both times are milliseconds per call."""

    client: str
    stream: bool
    round: int
    cpu_ms: float
    wall_ms: float


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=measuring.count, default=500, help="per client and round (default %(default)s)")
    parser.add_argument("--rounds", type=measuring.count, default=7, help="(default %(default)s)")
    parser.add_argument("--concurrency", type=measuring.count, default=8, help="calls at a time (default %(default)s)")
    parser.add_argument("--words", type=measuring.count, default=16, help="words of an answer (default %(default)s)")
    add_json_option(parser, "all rounds and the medians")
    options = parser.parse_args(argv)
    return run_command("upstream", lambda: _upstream(options), DidNotStart)


def _upstream(options: argparse.Namespace) -> int:
    port = free_port()
    command = [sys.executable, "-m", "benchmarks.gateways.stub", str(port)]
    with TemporaryDirectory() as folder:
        with running(command, port=port, ready_path="/livez", log=Path(folder) / "stub.log", env={}):
            rows = uvloop.run(_measure(f"http://127.0.0.1:{port}", options))
    medians = summary(rows)
    write_json(options.json, measuring.report(rows, medians))
    head = ["client", "response", "CPU ms/call", "wall ms/call", "CPU, times socket"]
    cells = [
        [
            row["client"],
            "stream" if row["stream"] else "whole",
            f"{row['cpu_ms']:.3f}",
            f"{row['wall_ms']:.3f}",
            f"{row['cpu_ratio']:.2f}",
        ]
        for row in medians
    ]
    print("\n" + render(head, cells))
    return 0


async def _measure(url: str, options: argparse.Namespace) -> list[Row]:
    rows = []
    async with AsyncExitStack() as stack:
        clients = await _clients(url, stack)
        for stream in (False, True):
            body = _body(options.words, stream)
            for call in clients.values():
                await _run(call, body, WARM_UP_CALLS, options.concurrency)
            for number in range(options.rounds):
                order = list(clients)
                for name in order[number % len(order) :] + order[: number % len(order)]:
                    cpu_ms, wall_ms = await _run(clients[name], body, options.calls, options.concurrency)
                    rows.append(Row(name, stream, number, cpu_ms, wall_ms))
    return rows


async def _run(call: Call, body: bytes, num_calls: int, concurrency: int) -> tuple[float, float]:
    """Return CPU and wall time per call, in milliseconds. Raises `OSError` for an empty answer."""
    remaining = iter(range(num_calls))

    async def repeat() -> None:
        for _ in remaining:
            if not await call(body):
                raise OSError("the stub server returned an empty answer")

    cpu_s, wall_s = time.process_time(), time.perf_counter()
    await asyncio.gather(*(repeat() for _ in range(concurrency)))
    cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - wall_s
    return cpu_s / num_calls * 1000, wall_s / num_calls * 1000


async def _clients(url: str, stack: AsyncExitStack) -> Mapping[str, Call]:
    clients: dict[str, Call] = {}
    for name, client in (("socket", SocketClient(url, {})), ("httpx", HttpxClient(url, {}))):
        stack.push_async_callback(client.aclose)
        clients[name] = _call_of(client)
    if importlib.util.find_spec("aiohttp") is not None:
        clients["aiohttp"] = await _aiohttp(url, stack)
    return clients


def _call_of(client: HttpClient) -> Call:
    async def call(body: bytes) -> bytes:
        async with client.stream("POST", PATH, body, timeout_s=TIMEOUT_S, connect_timeout_s=TIMEOUT_S) as response:
            return await response.read_all(TIMEOUT_S)

    return call


async def _aiohttp(url: str, stack: AsyncExitStack) -> Call:
    aiohttp: Any = importlib.import_module("aiohttp")  # not a dependency of this project

    session = await stack.enter_async_context(aiohttp.ClientSession(trust_env=False))

    async def call(body: bytes) -> bytes:
        headers = {"content-type": "application/json"}
        async with session.post(url + PATH, data=body, headers=headers) as response:
            return bytes(await response.read())

    return call


def _body(num_words: int, stream: bool) -> bytes:
    messages = [{"role": "user", "content": f"Say {num_words} words, one every 0 ms."}]
    return orjson.dumps({"messages": messages, "max_tokens": 256, "stream": stream})


def summary(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the medians of each client and kind of response; `cpu_ratio` is relative to the socket client."""
    found = []
    for stream in (False, True):
        of_kind = [row for row in rows if row.stream is stream]
        cpu_ms = {
            name: statistics.median(row.cpu_ms for row in of_kind if row.client == name)
            for name in dict.fromkeys(row.client for row in of_kind)
        }
        for name, median in cpu_ms.items():
            found.append(
                {
                    "client": name,
                    "stream": stream,
                    "cpu_ms": median,
                    "wall_ms": statistics.median(row.wall_ms for row in of_kind if row.client == name),
                    "cpu_ratio": median / cpu_ms["socket"],
                }
            )
    return found


if __name__ == "__main__":
    sys.exit(main())
