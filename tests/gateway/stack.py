"""A gateway with two fake workers, in process or on real sockets."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from fastapi import FastAPI

from gateway.app import create_app
from gateway.settings import from_values
from tests.serving import free_socket, serving, url_of
from tools.fake_worker import FAKE_SECRET, FakeWorker
from workers.api.http.protocol import Protocol
from workers.api.schemas import Message

LONG = " ".join(f"word{index}" for index in range(600))
SYSTEM: dict[str, Any] = {"role": "system", "content": f"You know this by heart: {LONG}"}
USER: dict[str, Any] = {"role": "user", "content": "What comes after word41?"}
MESSAGES: list[Any] = [SYSTEM, USER]


def values(**changes: Any) -> dict[str, Any]:
    """Return a configuration for the two fakes; `changes` replace whole sections."""
    return {
        "tiers": [{"name": "small", "model": "fake-small"}, {"name": "large", "model": "fake-large"}],
        "workers": {
            "small-0": {"tier": "small", "url": "http://small-0"},
            "large-0": {"tier": "large", "url": "http://large-0"},
        },
        "policy": {"name": "confidence", "threshold": -0.5, "num_tokens": 3},
        "deadlines": {"request_s": 10.0, "decode_reserve_s": 0.5},
    } | changes


def fakes() -> tuple[FakeWorker, FakeWorker]:
    small = FakeWorker("small-0", "fake-small")
    return small, FakeWorker("large-0", "fake-large", peers={"small-0": small})


@dataclass
class Stack:
    """A running gateway and its fake workers; `http` is a client of the gateway."""

    small: FakeWorker
    large: FakeWorker
    app: FastAPI
    http: httpx.AsyncClient
    url: str = "http://gateway"

    async def chat(self, messages: list[dict[str, Any]] = MESSAGES, **fields: Any) -> httpx.Response:
        kvrelay = fields.pop("kvrelay", None)
        body = {"model": "auto", "messages": messages} | fields | ({"kvrelay": kvrelay} if kvrelay else {})
        return await self.http.post("/v1/chat/completions", json=body)

    async def escalate(self, messages: list[dict[str, Any]] = MESSAGES, **options: Any) -> httpx.Response:
        return await self.chat(messages, kvrelay={"policy": "always_escalate"} | options)

    def metric(self, name: str, **labels: str) -> float:
        value = self.app.state.gateway.parts.metrics.registry.get_sample_value(f"kvrelay_{name}", labels)
        return 0.0 if value is None else float(value)

    async def check_health(self) -> None:
        """Run a health check of every worker now."""
        await self.app.state.gateway.parts.fleet.check_health()


@asynccontextmanager
async def in_process(
    extra_transports: Mapping[str, httpx.AsyncBaseTransport] | None = None, **changes: Any
) -> AsyncIterator[Stack]:
    """Run the gateway in process. `extra_transports` carry calls to workers besides the two fakes."""
    small, large = fakes()
    transports = {worker.name: httpx.ASGITransport(worker) for worker in (small, large)} | dict(extra_transports or {})
    app = create_app(from_values(values(**changes)), FAKE_SECRET, transports=transports)
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
            yield Stack(small, large, app, http)


@asynccontextmanager
async def live_stack(*others: FakeWorker, **changes: Any) -> AsyncIterator[Stack]:
    """Run the two fakes, `others` and the gateway on real sockets. A worker's name begins with its tier."""
    small, large = fakes()
    with ExitStack() as sockets:
        listeners = {sockets.enter_context(free_socket()): worker for worker in (small, large, *others)}
        gateway = sockets.enter_context(free_socket())
        workers = {one.name: {"tier": one.name.split("-")[0], "url": url_of(at)} for at, one in listeners.items()}
        app = create_app(from_values(values(**{"workers": workers} | changes)), FAKE_SECRET)
        sockets.enter_context(serving({**listeners, gateway: app}, {gateway: Protocol}))
        async with httpx.AsyncClient(base_url=url_of(gateway), timeout=30) as http:
            yield Stack(small, large, app, http, url_of(gateway))


def right_answer(worker: FakeWorker, messages: list[dict[str, Any]]) -> str:
    """Return this worker's answer to this prompt. Other prompts have other answers."""
    return worker.answer_to([Message.model_validate(message) for message in messages])


def text(reply: httpx.Response) -> str:
    assert reply.status_code == 200, reply.text
    return str(reply.json()["choices"][0]["message"]["content"])


def report(reply: httpx.Response) -> dict[str, Any]:
    """Return the reply's `kvrelay` field."""
    assert reply.status_code == 200, reply.text
    return dict(reply.json()["kvrelay"])


def follow_up(messages: list[dict[str, Any]], reply: httpx.Response, question: str) -> list[dict[str, Any]]:
    """Return the messages with the reply and the next question appended."""
    return [*messages, reply.json()["choices"][0]["message"], {"role": "user", "content": question}]


async def eventually(holds: Callable[[], bool], within_s: float = 5.0) -> None:
    """Wait until the condition holds."""
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline, f"the condition did not hold within {within_s} s"
        await asyncio.sleep(0.01)
