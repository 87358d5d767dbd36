"""Clients that hang up, over a real socket: the model stops and everything is released."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from tests.serving import free_socket, url_of
from tests.workers.server.support import SALT, SECRET, ServedWorker, content, counts, serving, until
from workers.api.http.protocol import Protocol
from workers.api.schemas import SECRET_HEADER
from workers.engines.scheduling import Compute

LONG = {"messages": [{"role": "user", "content": "fox " * 300}], "tenant_salt": SALT, "max_tokens": 700}
TCP_ESTABLISHED = 1
HANG_UPS = "client_disconnects_total"
PREFIX = {"messages": LONG["messages"], "tenant_salt": SALT}


class CountedCompute:
    """Counts started steps and delays each by 10 ms."""

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
async def listening(folder: Path) -> AsyncIterator[tuple[ServedWorker, str]]:
    """A worker behind a real socket whose model has no end token."""
    async with serving(folder, max_running=1) as served:
        object.__setattr__(served.worker.engine.model, "eos_ids", frozenset())
        served.worker.engine.compute = CountedCompute(served.worker.engine.compute)  # type: ignore[assignment]
        listener = free_socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1024)
        config = uvicorn.Config(served.app, http=Protocol, lifespan="off", log_level="error")
        server = uvicorn.Server(config)
        task = asyncio.create_task(server.serve([listener]))
        await until(lambda: server.started)
        yield served, url_of(listener)
        server.should_exit = True
        await task


async def hang_up_while(served: ServedWorker, url: str, path: str, body: dict[str, Any], steps: int) -> None:
    """Begin a call and drop the connection once `steps` steps have started."""
    compute: Any = served.worker.engine.compute
    begun = compute.num_begun
    async with httpx.AsyncClient(headers={SECRET_HEADER: SECRET}, trust_env=False) as http:
        call = asyncio.create_task(http.post(f"{url}{path}", json=body))
        await until(lambda: compute.num_begun >= begun + steps)
        call.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await call


async def assert_free(served: ServedWorker) -> None:
    """Assert that no request runs, no block is in use and no step follows."""
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
    ids=["whole-prefill", "whole-decode", "stream-prefill", "stream-decode", "prefill"],
)
async def test_disconnect_stops_the_model(
    listening: tuple[ServedWorker, str], path: str, body: dict[str, Any], steps: int
) -> None:
    served, url = listening
    await hang_up_while(served, url, path, body, steps)
    compute: Any = served.worker.engine.compute
    assert compute.num_begun < steps + 20
    await assert_free(served)
    assert content(await served.chat())


async def test_disconnect_in_the_queue_leaves_it(listening: tuple[ServedWorker, str]) -> None:
    served, url = listening
    async with served.worker.engine.admit():
        async with httpx.AsyncClient(headers={SECRET_HEADER: SECRET}, trust_env=False) as http:
            call = asyncio.create_task(http.post(f"{url}/v1/chat/completions", json=LONG))
            await until(lambda: served.worker.engine.admission.num_waiting == 1)
            call.cancel()
            await until(lambda: served.worker.engine.admission.num_waiting == 0)
    await assert_free(served)
    assert await counts(served, HANG_UPS) == {"queue": 1}


async def test_disconnects_are_counted_by_phase(listening: tuple[ServedWorker, str]) -> None:
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
async def test_cancellation_by_the_server_is_not_a_disconnect(
    listening: tuple[ServedWorker, str], stream: bool
) -> None:
    served, _ = listening
    compute: Any = served.worker.engine.compute
    cancelled = asyncio.create_task(served.http.post("/v1/chat/completions", json=LONG | {"stream": stream}))
    await until(lambda: compute.num_begun >= 1)
    cancelled.cancel()
    await asyncio.wait({cancelled})
    await assert_free(served)
    assert await counts(served, HANG_UPS) == {}


async def test_disconnect_does_not_cancel_a_shared_prefill(listening: tuple[ServedWorker, str]) -> None:
    served, url = listening
    async with httpx.AsyncClient(headers={SECRET_HEADER: SECRET}, trust_env=False) as http:
        staying = asyncio.create_task(http.post(f"{url}/v1/prefix/prefill", json=PREFIX, timeout=30))
        await hang_up_while(served, url, "/v1/prefix/prefill", PREFIX, 1)
        reply = await staying
    assert reply.status_code == 200 and served.worker.pool.stats.num_caches == 1


@pytest.mark.parametrize("fits", [False, True])
async def test_client_that_stalls_is_disconnected(
    listening: tuple[ServedWorker, str], monkeypatch: pytest.MonkeyPatch, fits: bool
) -> None:
    """While the model generates, or afterwards if the socket buffers hold the whole answer."""
    served, url = listening
    monkeypatch.setattr("workers.routes.edge.STALL_S", 0.2)
    short = {"max_tokens": 4, "kv_transfer_params": {"store": False}} if fits else {}
    wide = {"stream": True, "logprobs": True, "top_logprobs": 20}
    body = httpx.Request("POST", url, json=LONG | wide | short).content
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: w\r\n{SECRET_HEADER}: {SECRET}\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        client.connect(("127.0.0.1", int(url.rpartition(":")[2])))
        client.sendall(head.encode() + body)
        await until(lambda: served.worker.engine.admission.num_running == 1)
        await until(lambda: not is_established(client))
    await assert_free(served)
    assert await counts(served, HANG_UPS) == ({} if fits else {"decode": 1})


def is_established(client: socket.socket) -> bool:
    return client.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == TCP_ESTABLISHED
