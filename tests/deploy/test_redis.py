"""The shipped Redis: its user may do what gateways and workers need, and nothing else."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis.exceptions
from redis.asyncio import Redis

from deploy.composed import Composed
from tests.gateway.redis_process import redis_process
from tests.gateway.stack import in_process
from workers.api.config import DiscoverySettings
from workers.api.heartbeat import Board, Heartbeat

SECRET = "a secret of the cluster"
OPS = ("put", "get", "forget", "quota_hit", "quota_test")  # every operation of a gateway


@pytest.fixture(scope="module")
def secrets(project: Path) -> Path:
    return project / ".kvrelay" / "deploy"


@pytest.fixture(scope="module")
def url(require_tool: Callable[[str], str], secrets: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("redis")
    with redis_process(require_tool("redis-server"), folder, "--aclfile", str(secrets / "redis-users")) as running:
        yield running.url


async def test_user_may_write_heartbeats(url: str, secrets: Path) -> None:
    discovery = DiscoverySettings(url=url, password_file=secrets / "redis-password")
    board = Board(discovery.url_with_password("discovery"), SECRET)
    now = time.time()
    lives, gone = (
        Heartbeat(worker=name, tier="small", url="http://small", epoch="e", at=at)
        for name, at in (("small-0", now), ("small-1", now - 3600))
    )
    for beat in (lives, gone):
        await board.put(beat)
    assert await board.read() == [lives], "and the old one is removed"
    await board.remove("small-0")
    assert await board.read() == []
    await board.aclose()


async def test_user_may_write_prefixes_and_quotas(url: str, secrets: Path) -> None:
    registry = {"url": url, "password_file": str(secrets / "redis-password")}
    tenants = {"default": {"requests_per_minute": 10_000, "tokens_per_minute": 10_000_000}}
    async with in_process(registry=registry, tenants=tenants) as stack, asyncio.timeout(30):
        while not all(stack.metric("registry_ops_total", op=op, result="ok") for op in OPS):  # one may time out
            await stack.chat()
            stack.small.restart()  # so that its entries are forgotten
        assert not any(stack.metric("registry_ops_total", op=op, result="error") for op in OPS)


@pytest.mark.parametrize(
    "command", [("SET", "another:key", "1"), ("HSET", "another:key", "f", "1"), ("FLUSHALL",), ("CONFIG", "GET", "*")]
)
async def test_user_may_do_nothing_else(url: str, secrets: Path, command: tuple[str, ...]) -> None:
    async with Redis.from_url(url, password=(secrets / "redis-password").read_text()) as client:
        with pytest.raises(redis.exceptions.NoPermissionError):
            await client.execute_command(*command)
    async with Redis.from_url(url) as stranger:
        with pytest.raises(redis.exceptions.AuthenticationError):
            await stranger.get("kvrelay:prefix:a")


def test_services_that_use_redis_have_its_password(composed: Composed) -> None:
    users = [one for name, one in composed.services.items() if name == "gateway" or name.startswith("worker-")]
    assert all("redis-password" in one.secrets for one in users)
