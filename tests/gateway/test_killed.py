"""A worker process that is killed, frozen, or restarted on the same port, over real sockets."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from gateway.app import create_app
from gateway.settings import from_values
from tests.gateway.stack import MESSAGES, Stack, fakes, report, right_answer, text, values
from tests.serving import free_socket, serving, url_of
from tools.fake_worker import FAKE_SECRET

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
REQUEST_S = 3.0
SERVE = """
import sys, uvicorn
from tools.fake_worker import FakeWorker
worker = FakeWorker("small-0", "fake-small")
worker.delay("prefill", float(sys.argv[2]))
uvicorn.run(worker, port=int(sys.argv[1]), log_config=None)
"""


@contextmanager
def small_process(port: int, *, prefill_s: float = 0.0) -> Iterator[subprocess.Popen[bytes]]:
    """Run a fake small worker in a separate process."""
    process = subprocess.Popen([sys.executable, "-c", SERVE, str(port), str(prefill_s)], cwd=ROOT)
    try:
        deadline = time.monotonic() + 30
        while not _answers(port):
            assert process.poll() is None and time.monotonic() < deadline, "the worker did not start"
            time.sleep(0.02)
        yield process
    finally:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait(10)


def _answers(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/livez", timeout=1).status_code == 200
    except httpx.HTTPError:
        return False


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.fixture
async def stack(port: int) -> AsyncIterator[Stack]:
    """Run the gateway and the large worker in this process. The small worker listens on `port`."""
    small, large = fakes()
    with ExitStack() as opened:
        listeners = {"large-0": opened.enter_context(free_socket()), "gateway": opened.enter_context(free_socket())}
        workers = {
            "small-0": {"tier": "small", "url": f"http://127.0.0.1:{port}"},
            "large-0": {"tier": "large", "url": url_of(listeners["large-0"])},
        }
        deadlines = {"request_s": REQUEST_S, "decode_reserve_s": 0.2, "worker_poll_s": 0.1}
        app = create_app(from_values(values(workers=workers, deadlines=deadlines)), FAKE_SECRET)
        opened.enter_context(serving({listeners["large-0"]: large, listeners["gateway"]: app}))
        url = url_of(listeners["gateway"])
        async with httpx.AsyncClient(base_url=url, timeout=30) as http:
            yield Stack(small, large, app, http, url)


async def wait_until_small(stack: Stack, *, usable: bool) -> None:
    deadline = time.monotonic() + 20
    while (await stack.http.get("/readyz")).json()["tiers"]["small"] is not usable:
        assert time.monotonic() < deadline, f"usable did not become {usable} within 20 s"
        await asyncio.sleep(0.05)


async def test_a_worker_killed_during_its_prefill_is_replaced(stack: Stack, port: int) -> None:
    with small_process(port, prefill_s=30.0) as process:
        await wait_until_small(stack, usable=True)
        request = asyncio.create_task(stack.chat())
        await asyncio.sleep(0.3)
        process.kill()
        reply = await request
        assert report(reply)["path"] == "fallback:small_worker_unavailable"
        assert text(reply) == right_answer(stack.large, MESSAGES)
    await wait_until_small(stack, usable=False)
    assert report(await stack.chat())["path"].startswith("fallback:small_no_usable_worker")


async def test_a_frozen_worker_is_replaced(stack: Stack, port: int) -> None:
    with small_process(port) as process:
        await wait_until_small(stack, usable=True)
        process.send_signal(signal.SIGSTOP)
        started = time.monotonic()
        reply = await stack.chat()
        assert time.monotonic() - started < REQUEST_S
        assert report(reply)["path"] == "fallback:small_deadline_exceeded"
        assert text(reply) == right_answer(stack.large, MESSAGES)


async def test_a_worker_restarted_on_the_same_port_prefills_again(stack: Stack, port: int) -> None:
    with small_process(port):
        await wait_until_small(stack, usable=True)
        assert report(await stack.chat())["path"] == "prefill"
        assert report(await stack.chat())["path"] == "exact"
    await wait_until_small(stack, usable=False)
    with small_process(port):
        await wait_until_small(stack, usable=True)
        reply = await stack.chat()
        assert report(reply)["path"] == "prefill", "the first process's cache is gone, and is not requested"
        assert text(reply) == right_answer(stack.small, MESSAGES)
        assert stack.metric("worker_restarts_total", target="small-0") == 1
        assert stack.metric("prefix_lookup_stale_total", tier="small") == 0
