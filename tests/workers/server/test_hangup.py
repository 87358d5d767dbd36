"""Clients that hang up, over a real socket: the model stops, and everything is free again."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from tests.workers.server.support import SALT, SECRET, Served, content, counts, serving, until
from workers.api.schemas import SECRET_HEADER
from workers.engines.compute import Compute

LONG = {"messages": [{"role": "user", "content": "fox " * 300}], "tenant_salt": SALT, "max_tokens": 700}
HANG_UPS = "client_disconnects_total"
PREFIX = {"messages": LONG["messages"], "tenant_salt": SALT}


class CountedCompute:
    """Counts the steps that have begun, each of which takes a moment longer than it needs."""

    def __init__(self, compute: Compute):
        self._compute = compute
        self.num_begun = 0

    async def run(self, step: Any, *, priority: int = 0) -> Any:
        def counted() -> Any:
            self.num_begun += 1
            return step()

        await asyncio.sleep(0.01)
        return await self._compute.run(counted, priority=priority)

    def close(self) -> None:
        self._compute.close()


@pytest.fixture
async def listening(folder: Path) -> AsyncIterator[tuple[Served, str]]:
    """A worker on a port of this machine, whose model never ends an answer by itself."""
    async with serving(folder, max_running=1) as served:
        object.__setattr__(served.worker.engine.model, "eos_ids", frozenset())
        served.worker.engine.compute = CountedCompute(served.worker.engine.compute)  # type: ignore[assignment]
        server = uvicorn.Server(uvicorn.Config(served.app, port=0, lifespan="off", log_level="error"))
        task = asyncio.create_task(server.serve())
        await until(lambda: server.started)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield served, f"http://127.0.0.1:{port}"
        server.should_exit = True
        await task


async def hang_up_while(served: Served, url: str, path: str, body: dict[str, Any], steps: int) -> None:
    """Begin a call, and drop the connection once `steps` steps have run."""
    compute: Any = served.worker.engine.compute
    begun = compute.num_begun
    async with httpx.AsyncClient(headers={SECRET_HEADER: SECRET}, trust_env=False) as http:
        call = asyncio.create_task(http.post(f"{url}{path}", json=body))
        await until(lambda: compute.num_begun >= begun + steps)
        call.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await call


async def assert_free(served: Served) -> None:
    """Nothing runs, nothing is held, and no step follows."""
    worker, compute = served.worker, served.worker.engine.compute
    await until(lambda: worker.engine.admission.num_running == 0)
    begun = compute.num_begun  # type: ignore[attr-defined]
    await asyncio.sleep(0.1)
    assert compute.num_begun == begun  # type: ignore[attr-defined]
    await until(lambda: worker.pool.stats.used_blocks == 0)


@pytest.mark.parametrize(
    ("path", "body", "steps"),
    [
        ("/v1/chat/completions", LONG, 1),
        ("/v1/chat/completions", LONG, 8),
        ("/v1/chat/completions", LONG | {"stream": True}, 1),
        ("/v1/chat/completions", LONG | {"stream": True}, 8),
        ("/v1/prefix/prefill", PREFIX, 1),
    ],
    ids=["whole-reading", "whole-writing", "stream-reading", "stream-writing", "prefill"],
)
async def test_a_hang_up_stops_the_model(
    listening: tuple[Served, str], path: str, body: dict[str, Any], steps: int
) -> None:
    served, url = listening
    await hang_up_while(served, url, path, body, steps)
    compute: Any = served.worker.engine.compute
    assert compute.num_begun < steps + 20
    await assert_free(served)
    assert content(await served.chat())


async def test_a_hang_up_in_the_queue_leaves_it(listening: tuple[Served, str]) -> None:
    served, url = listening
    async with served.worker.engine.admit():
        async with httpx.AsyncClient(headers={SECRET_HEADER: SECRET}, trust_env=False) as http:
            call = asyncio.create_task(http.post(f"{url}/v1/chat/completions", json=LONG))
            await until(lambda: served.worker.engine.admission.num_waiting == 1)
            call.cancel()
            await until(lambda: served.worker.engine.admission.num_waiting == 0)
    await assert_free(served)
    assert await counts(served, HANG_UPS) == {"queue": 1}


async def test_hang_ups_are_counted_by_phase(listening: tuple[Served, str]) -> None:
    served, url = listening
    await hang_up_while(served, url, "/v1/chat/completions", LONG, 1)
    await assert_free(served)
    await hang_up_while(served, url, "/v1/chat/completions", LONG | {"stream": True}, 8)
    await assert_free(served)
    assert await counts(served, HANG_UPS) == {"prefill": 1, "decode": 1}
    await hang_up_while(served, url, "/v1/prefix/prefill", PREFIX, 1)
    await assert_free(served)
    assert await counts(served, HANG_UPS) == {"prefill": 2, "decode": 1}


@pytest.mark.parametrize("stream", [False, True])
async def test_whom_our_own_end_cuts_off_has_not_hung_up(listening: tuple[Served, str], stream: bool) -> None:
    served, _ = listening
    compute: Any = served.worker.engine.compute
    cut_off = asyncio.create_task(served.http.post("/v1/chat/completions", json=LONG | {"stream": stream}))
    await until(lambda: compute.num_begun >= 1)
    cut_off.cancel()
    await asyncio.wait({cut_off})
    await assert_free(served)
    assert await counts(served, HANG_UPS) == {}


async def test_who_shares_a_prefill_is_not_hurt_by_anothers_hang_up(listening: tuple[Served, str]) -> None:
    served, url = listening
    async with httpx.AsyncClient(headers={SECRET_HEADER: SECRET}, trust_env=False) as http:
        staying = asyncio.create_task(http.post(f"{url}/v1/prefix/prefill", json=PREFIX, timeout=30))
        await hang_up_while(served, url, "/v1/prefix/prefill", PREFIX, 1)
        reply = await staying
    assert reply.status_code == 200 and served.worker.pool.stats.num_caches == 1


@pytest.mark.parametrize("at_the_end", [False, True])
async def test_a_client_that_takes_nothing_counts_as_gone(
    listening: tuple[Served, str], monkeypatch: pytest.MonkeyPatch, at_the_end: bool
) -> None:
    served, _ = listening
    monkeypatch.setattr("workers.routes.sse.STALL_S", 0.05)
    short = {"max_tokens": 3, "kv_transfer_params": {"store": False}} if at_the_end else {}
    body = httpx.Request("POST", "http://w", json=LONG | short | {"stream": True}).content
    received = asyncio.Queue[dict[str, Any]]()
    received.put_nowait({"type": "http.request", "body": body, "more_body": False})
    sent: list[str] = []

    async def send(message: Any) -> None:
        sent.append(message["type"])
        if message["type"] == "http.response.body" and not (at_the_end and message["more_body"]):
            await asyncio.Event().wait()

    headers = [(b"content-type", b"application/json"), (SECRET_HEADER.encode(), SECRET.encode())]
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": headers, "query_string": b""}
    await asyncio.wait_for(served.app(scope, received.get, send), 20)
    assert set(sent) == {"http.response.start", "http.response.body"} and (len(sent) == 2) is not at_the_end
    await assert_free(served)
    assert await counts(served, HANG_UPS) == {"decode": 1}
