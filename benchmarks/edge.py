"""CPU per request of the gateway, with and without the shortcut past FastAPI's router.

    python -m benchmarks.edge --json edge.json

    this process   round 1: shortcut, router    round 2: router, shortcut    ...
    stub process   answers every call at once, whole or as a stream

Every request is a chat completion that goes through the ASGI application and on to the stub worker over a socket;
uvicorn takes no part. Both arms are the same application, the second one without `EdgeMiddleware`'s shortcuts. Reported
are medians over the rounds. The full run takes about half a minute.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import orjson
import uvloop
from fastapi import FastAPI
from structlog.testing import capture_logs

from benchmarks.gateways.processes import DidNotStart, free_port, running
from benchmarks.gateways.stub import MODEL
from gateway.app import create_app
from gateway.settings import from_values
from tools import measuring
from tools.output import add_json_option, render, run_command, write_json
from workers.api.http.edge import EdgeMiddleware

PATH = "/v1/chat/completions"
ARMS = ("shortcut", "router")
WARM_UP_REQUESTS = 50


@dataclass(frozen=True)
class Row:
    """One round of one arm."""

    arm: str
    stream: bool
    round: int
    cpu_ms: float


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=measuring.count, default=300, help="per arm and round (default %(default)s)")
    parser.add_argument("--rounds", type=measuring.count, default=9, help="(default %(default)s)")
    add_json_option(parser, "all rounds and the medians")
    options = parser.parse_args(argv)
    return run_command("edge", lambda: _edge(options), DidNotStart)


def _edge(options: argparse.Namespace) -> int:
    port = free_port()
    command = [sys.executable, "-m", "benchmarks.gateways.stub", str(port)]
    with TemporaryDirectory() as folder:
        with running(command, port=port, ready_path="/livez", log=Path(folder) / "stub.log", env={}):
            with capture_logs():
                rows = uvloop.run(_measure(f"http://127.0.0.1:{port}", options))
    medians = summary(rows)
    write_json(options.json, measuring.report(rows, medians))
    head = ["response", *(f"{arm}, CPU ms" for arm in ARMS), "router costs, us"]
    cells = [
        ["stream" if row["stream"] else "whole", *(f"{row[arm]:.3f}" for arm in ARMS), f"{row['router_costs_us']:.0f}"]
        for row in medians
    ]
    print("\n" + render(head, cells))
    return 0


async def _measure(url: str, options: argparse.Namespace) -> list[Row]:
    rows = []
    settings = {"tiers": [{"name": MODEL, "model": MODEL}], "workers": {"stub-0": {"tier": MODEL, "url": url}}}
    app = create_app(from_values(settings), "0" * 32)
    apps = {"shortcut": app.build_middleware_stack(), "router": _without_shortcuts(app).build_middleware_stack()}
    async with app.router.lifespan_context(app):
        for stream in (False, True):
            for asgi in apps.values():
                await _cpu_ms(app, asgi, stream, WARM_UP_REQUESTS)
            for number in range(options.rounds):
                for arm in ARMS if number % 2 else reversed(ARMS):
                    cpu_ms = await _cpu_ms(app, apps[arm], stream, options.requests)
                    rows.append(Row(arm, stream, number, cpu_ms))
    return rows


def _without_shortcuts(app: FastAPI) -> FastAPI:
    for middleware in app.user_middleware:
        if middleware.cls is EdgeMiddleware:
            middleware.kwargs["shortcuts"] = {}
    return app


async def _cpu_ms(app: FastAPI, asgi: Any, stream: bool, num_requests: int) -> float:
    """CPU time of this process per request, in milliseconds. Raises `OSError` for a reply that is not a 200."""
    message = {"role": "user", "content": "Say 16 words, one every 0 ms."}
    body = orjson.dumps({"model": MODEL, "messages": [message], "stream": stream})
    began_s = time.process_time()
    for _ in range(num_requests):
        status = await _post(app, asgi, body)
        if status != 200:
            raise OSError(f"the gateway answered {status}")
    return (time.process_time() - began_s) / num_requests * 1000


async def _post(app: FastAPI, asgi: Any, body: bytes) -> int:
    """One request, as uvicorn would hand it over; returns the status of the reply."""
    status, is_sent = 0, False
    headers = [(b"host", b"gateway"), (b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": PATH,
        "raw_path": PATH.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": headers,
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 8000),
        "state": {"body_left": False},
        "app": app,
    }

    async def receive() -> Any:
        nonlocal is_sent
        if is_sent:
            await asyncio.Event().wait()  # the client stays
        is_sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]

    await asgi(scope, receive, send)
    return status


def summary(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Medians of both arms in milliseconds, and of the difference within a round in microseconds."""
    found: list[dict[str, Any]] = []
    for stream in (False, True):
        of_kind = sorted((row for row in rows if row.stream is stream), key=lambda row: row.round)
        cpu_ms = {arm: [row.cpu_ms for row in of_kind if row.arm == arm] for arm in ARMS}
        medians = {arm: statistics.median(cpu_ms[arm]) for arm in ARMS}
        differences = [slow - fast for fast, slow in zip(cpu_ms["shortcut"], cpu_ms["router"], strict=True)]
        found.append({"stream": stream, **medians, "router_costs_us": statistics.median(differences) * 1000})
    return found


if __name__ == "__main__":
    sys.exit(main())
