"""Engine warm-up: if it fails or the worker is stopped, the worker leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.workers.engines import tiny
from tests.workers.server.support import SECRET
from workers import process
from workers.api.errors import DeadlineExceeded
from workers.pool.segment import SHM
from workers.serving.worker import build_worker


async def test_failed_warm_up_leaves_no_segment(folder: Path) -> None:
    worker = build_worker(tiny.settings_for(folder, id="cold-0"), SECRET)
    assert list(SHM.glob("*-cold-0-*"))

    async def fail() -> None:
        raise DeadlineExceeded("planted")

    worker.engine.warm_up = fail  # type: ignore[method-assign]
    with pytest.raises(DeadlineExceeded, match="planted"):
        async with worker:
            pytest.fail("the worker became ready")
    assert not list(SHM.glob("*-cold-0-*"))


@pytest.fixture
async def restored_signals() -> AsyncIterator[None]:
    """Remove the signal handlers that a worker installs in this process."""
    yield
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().remove_signal_handler(number)


@pytest.mark.usefixtures("restored_signals")
async def test_sigterm_during_warm_up_ends_the_worker(folder: Path, tmp_path: Path) -> None:
    worker, is_warming = build_worker(tiny.settings_for(folder, id="cold-1"), SECRET), asyncio.Event()

    async def warm_up() -> None:
        is_warming.set()
        await asyncio.sleep(600)

    worker.engine.warm_up = warm_up  # type: ignore[method-assign]
    listener, ready_file = socket.create_server(("127.0.0.1", 0)), tmp_path / "ready.json"
    serving = asyncio.create_task(process.run(worker, SECRET, listener, ready_file))
    await is_warming.wait()
    os.kill(os.getpid(), signal.SIGTERM)
    assert await asyncio.wait_for(serving, 5.0) == 0
    assert not ready_file.exists() and not list(SHM.glob("*-cold-1-*"))
