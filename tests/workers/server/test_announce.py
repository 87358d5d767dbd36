"""Worker discovery: a worker's heartbeats, and the peers it finds by theirs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.types import ASGIApp

from tests.gateway.redis_process import redis_process
from tests.workers.engines import tiny
from tests.workers.server.support import SALT, SECRET, ServedWorker, serving, transfer_request
from workers.api.config import SettingsError, with_password
from workers.api.errors import InvalidRequest
from workers.api.heartbeat import Board
from workers.api.schemas import PrefillRequest, TransferReply
from workers.process import announced, serve


async def transfer(cache_id: str, large: ServedWorker) -> TransferReply:
    return await large.client.transfer(transfer_request(cache_id), timeout_s=60)


async def transfer_once_discovered(cache_id: str, large: ServedWorker) -> TransferReply:
    async with asyncio.timeout(20):
        while True:
            try:
                return await transfer(cache_id, large)
            except InvalidRequest:
                await asyncio.sleep(0.05)


def test_wildcard_host_requires_url(folder: Path) -> None:
    settings = tiny.settings_for(folder, host="0.0.0.0", discovery={"url": "redis://127.0.0.1"})
    with pytest.raises(SettingsError, match=r"listens on 0\.0\.0\.0, .* every address .*; with discovery, set url"):
        serve(settings, SECRET)


def test_missing_password_file_stops_startup(folder: Path, tmp_path: Path) -> None:
    discovery = {"url": "redis://127.0.0.1", "password_file": tmp_path / "nowhere"}
    with pytest.raises(SettingsError, match=r"^discovery\.password_file: cannot read .*nowhere"):
        serve(tiny.settings_for(folder, discovery=discovery), SECRET)


async def test_workers_discover_each_other(
    folder: Path, small_folder: Path, bundle: Path, require_tool: Callable[[str], str], tmp_path: Path
) -> None:
    apps: dict[str, ASGIApp] = {}
    password, path = "of sixteen and more characters", tmp_path / "password"
    path.write_text(password)
    path.chmod(0o600)
    with redis_process(require_tool("redis-server"), tmp_path, "--requirepass", password) as redis:
        discovery = {"url": redis.url, "password_file": path, "beat_s": 0.05, "lost_after_s": 60.0}
        both: dict[str, Any] = {"discovery": discovery, "discoverable": apps}
        async with (
            serving(small_folder, id="small", **both) as small,
            serving(folder, id="large", tier="large", bundles=[bundle], **both) as large,
        ):
            apps |= {"small": small.app, "large": large.app}
            prefill = PrefillRequest(token_ids=small.prompt(), tenant_salt=SALT)
            prefilled = await small.client.prefill(prefill, timeout_s=60)
            with pytest.raises(InvalidRequest, match="unknown source_worker 'small'; known peers: none"):
                await transfer(prefilled.cache_id, large)
            board = Board(with_password(redis.url, password), SECRET)
            async with announced(large.worker, SECRET, "http://large.test"):
                async with announced(small.worker, SECRET, "http://small.test"):
                    moved = await transfer_once_discovered(prefilled.cache_id, large)
                    assert moved.num_tokens == len(small.prompt())
                (beat,) = await board.read()
                assert (beat.worker, beat.tier, beat.url) == ("large", "large", "http://large.test")
                assert beat.epoch == large.worker.pool.epoch, "the small worker has left the board"
            await board.aclose()
