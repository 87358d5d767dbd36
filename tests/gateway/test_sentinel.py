"""Redis behind sentinels: during a failover, requests succeed, at worst with a miss."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from redis.asyncio.sentinel import SentinelManagedSSLConnection

from gateway.settings import from_values
from gateway.state.redis import SharedRedis
from gateway.state.registry import RedisRegistry, connect
from tests.gateway.redis_process import redis_process, sentinel, watched_redis
from tests.gateway.stack import MESSAGES, in_process, report, right_answer, text, values
from workers.api.config import SettingsError
from workers.api.redis import MAX_CONNECTIONS, MasterPool, connection_pool

pytestmark = pytest.mark.slow

TIMEOUT_MS = 100
FAILOVER_TIMEOUT_S = 60.0  # for a busy machine; usually a few seconds


async def test_requests_succeed_during_a_failover(require_tool: Callable[[str], str], tmp_path: Path) -> None:
    with watched_redis(require_tool("redis-server"), tmp_path) as redis:
        async with in_process(
            registry={"url": redis.url, "timeout_ms": TIMEOUT_MS},
            tenants={"default": {"requests_per_minute": 1000}},
        ) as stack:

            def num(result: str) -> float:
                ops = ("get", "put", "quota_hit")
                return sum(stack.metric("registry_ops_total", op=op, result=result) for op in ops)

            async def answered() -> str:
                reply = await stack.chat()
                assert text(reply) == right_answer(stack.small, MESSAGES)
                return str(report(reply)["path"])

            await answered()
            assert await answered() == "exact"
            num_ok = num("ok")
            redis.master.kill()
            for _ in range(8):  # before the sentinels notice
                assert await answered() in ("exact", "prefill")
            failed = num("error") + num("timeout")
            assert failed == 1, "only the first; then the circuit is open"
            assert num("skipped") > 10
            deadline = time.monotonic() + FAILOVER_TIMEOUT_S
            while num("ok") < num_ok + 4:
                assert time.monotonic() < deadline, "the new master was not found"
                await asyncio.sleep(0.1)
                assert await answered() in ("exact", "prefill")


async def test_operations_wait_for_a_free_connection(require_tool: Callable[[str], str], tmp_path: Path) -> None:
    ops: list[str] = []
    binary = require_tool("redis-server")
    with redis_process(binary, tmp_path) as master, sentinel(binary, tmp_path, master.port) as port:
        url = f"redis+sentinel://127.0.0.1:{port}/kvrelay"
        redis = SharedRedis(url, timeout_s=10.0, on_op=lambda op, result: ops.append(result))
        assert await asyncio.gather(*(redis.run("ping", redis.client.ping) for _ in range(MAX_CONNECTIONS + 8)))
        assert ops == ["ok"] * (MAX_CONNECTIONS + 8)
        await redis.aclose()


def sentinels_of(pool: MasterPool) -> list[tuple[str, int]]:
    kwargs = [sentinel.connection_pool.connection_kwargs for sentinel in pool.sentinel_manager.sentinels]
    return [(one["host"], one["port"]) for one in kwargs]


def test_url_names_sentinels_master_and_credentials() -> None:
    pool = connection_pool("rediss+sentinel://me:p%40ss@one:1,two,[::1]:3/main/2", timeout_s=1.0)
    assert isinstance(pool, MasterPool) and pool.connection_class is SentinelManagedSSLConnection
    assert (sentinels_of(pool), pool.service_name) == ([("one", 1), ("two", 26379), ("::1", 3)], "main")
    known = {"db": 2, "username": "me", "password": "p@ss", "socket_timeout": 1.0, "socket_connect_timeout": 1.0}
    assert pool.connection_kwargs.items() >= known.items()
    plain = connection_pool("redis+sentinel://one/main", timeout_s=1.0)
    assert plain.connection_kwargs["db"] == 0 and plain.connection_kwargs.get("password") is None


@pytest.mark.parametrize("host", ["[::1]:3,one", "one,[::1]:3"])
def test_sentinel_may_have_an_ipv6_address(tmp_path: Path, host: str) -> None:
    """Also in a registry, with the password in a file."""
    password = tmp_path / "password"
    password.write_text("p@ss/w?rd-of-sixteen-and-more-characters\n")
    password.chmod(0o600)
    url = f"redis+sentinel://me@{host}/main"
    settings = from_values(values(registry={"url": url, "password_file": str(password)})).registry
    pool = connection_pool(settings.full_url, timeout_s=1.0)
    assert isinstance(pool, MasterPool)
    credentials = (pool.connection_kwargs["username"], pool.connection_kwargs["password"])
    assert credentials == ("me", "p@ss/w?rd-of-sixteen-and-more-characters")
    assert sorted(sentinels_of(pool)) == [("::1", 3), ("one", 26379)]
    assert isinstance(connect(settings, lambda op, result: None), RedisRegistry)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("redis+sentinel://one", r"must have the form redis\+sentinel://"),
        ("redis+sentinel:///main", r"must have the form redis\+sentinel://"),
        ("redis+sentinel://one/main/x", r"must have the form redis\+sentinel://"),
        ("redis+sentinel://one,/main/x", ".*empty host"),
    ],
)
def test_incomplete_sentinel_url_is_rejected(url: str, message: str) -> None:
    with pytest.raises(SettingsError, match=f"registry.url: {message}"):
        from_values(values(registry={"url": url}))
