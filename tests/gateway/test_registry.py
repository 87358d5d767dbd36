"""The contract of both registries, and the cost of a frozen or dead Redis."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import redis.asyncio

from gateway.settings import RegistrySettings
from gateway.state import registry
from gateway.state.redis import CIRCUIT, SharedRedis
from gateway.state.registry import KEY_PREFIX, Entry, RedisRegistry, Registry
from tests.gateway.redis_process import RedisProcess, redis_process
from tests.gateway.stack import MESSAGES, Stack, eventually, in_process, report, right_answer, text

Ops = list[tuple[str, str]]

OPERATIONS = ("get", "put", "forget", "quota_hit", "quota_test")


@pytest.fixture(scope="module")
def shared_redis(
    require_tool: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RedisProcess]:
    with redis_process(require_tool("redis-server"), tmp_path_factory.mktemp("redis")) as process:
        yield process


@pytest.fixture
def own_redis(require_tool: Callable[[str], str], tmp_path: Path) -> Iterator[RedisProcess]:
    with redis_process(require_tool("redis-server"), tmp_path) as process:
        yield process


@pytest.fixture
def ops() -> Ops:
    return []


def with_long_timeout(url: str) -> RegistrySettings:
    """A registry with a long timeout: these tests are about results, on a machine that may be busy."""
    return RegistrySettings.model_construct(url=url, timeout_ms=10_000)


def redis_registry(redis: RedisProcess, ops: Ops | None = None, timeout_s: float = 10.0) -> RedisRegistry:
    recorded = [] if ops is None else ops
    guarded = SharedRedis(redis.url, timeout_s=timeout_s, on_op=lambda op, result: recorded.append((op, result)))
    return RedisRegistry(guarded)


@pytest.fixture(params=["memory", "redis"])
async def store(request: pytest.FixtureRequest, ops: Ops) -> AsyncIterator[Registry]:
    url = "memory://" if request.param == "memory" else request.getfixturevalue("shared_redis").url
    store = registry.connect(with_long_timeout(url), lambda op, result: ops.append((op, result)))
    yield store
    await store.aclose()


def entry(number: int = 0, *, lives_s: float = 60.0) -> Entry:
    return Entry(
        cache_id=f"kvc-{number:032x}",
        worker="small-0",
        epoch="e1",
        tenant="default",
        num_tokens=100 + number,
        digest="d" * 64,
        provenance="exact",
        expires_at=time.time() + lives_s,
    )


async def test_entries_are_returned_in_order(store: Registry) -> None:
    one, two = entry(1), entry(2)
    await store.put_many({"order-1": one, "order-2": two})
    assert await store.get_many(["order-2", "absent", "order-1"]) == [two, None, one]


async def test_empty_calls(store: Registry) -> None:
    assert await store.get_many([]) == []
    await store.put_many({})


async def test_later_entry_replaces_earlier(store: Registry) -> None:
    await store.put_many({"replace": entry(1)})
    await store.put_many({"replace": (later := entry(2))})
    assert await store.get_many(["replace"]) == [later]


async def test_entry_expires(store: Registry) -> None:
    await store.put_many({"brief": entry(lives_s=0.15), "past": entry(lives_s=-1.0)})
    assert (await store.get_many(["brief", "past"]))[1] is None
    await asyncio.sleep(0.2)
    assert await store.get_many(["brief"]) == [None]


async def test_forget_deletes_only_the_given_entry(store: Registry) -> None:
    stale, fresh = entry(1), entry(2)
    await store.put_many({"forget": fresh})
    await store.forget("forget", stale)
    assert await store.get_many(["forget"]) == [fresh]
    await store.forget("forget", fresh)
    await store.forget("never there", fresh)
    assert await store.get_many(["forget"]) == [None]


async def test_operations_are_reported(store: Registry, ops: Ops) -> None:
    await store.put_many({"reported": entry()})
    await store.get_many(["reported"])
    await store.forget("reported", entry())
    assert ops == [("put", "ok"), ("get", "ok"), ("forget", "ok")]


async def test_memory_evicts_least_recently_used() -> None:
    store = registry.connect(RegistrySettings(max_entries=2), lambda op, result: None)
    await store.put_many({"a": entry(1), "b": entry(2)})
    await store.get_many(["a"])
    await store.put_many({"c": entry(3)})
    assert [found and found.num_tokens for found in await store.get_many(["a", "b", "c"])] == [101, None, 103]


async def test_two_gateways_share_a_redis(shared_redis: RedisProcess) -> None:
    one, other = (redis_registry(shared_redis) for _ in range(2))
    await one.put_many({"shared": (stored := entry(7))})
    assert await other.get_many(["shared"]) == [stored]
    await one.aclose()
    await other.aclose()


async def test_password_comes_from_a_file(require_tool: Callable[[str], str], tmp_path: Path, ops: Ops) -> None:
    password, path = "p@ss/word:with?marks", tmp_path / "password"
    path.write_text(f"{password}\n")
    path.chmod(0o600)
    with redis_process(require_tool("redis-server"), tmp_path, "--requirepass", password) as redis:
        known = with_long_timeout(redis.url).model_copy(update={"password_file": path})
        for settings, result in ((with_long_timeout(redis.url), "error"), (known, "ok")):
            store = registry.connect(settings, lambda op, result: ops.append((op, result)))
            await store.get_many(["a"])
            assert ops[-1] == ("get", result)
            await store.aclose()


async def test_reload_applies_a_new_password(require_tool: Callable[[str], str], tmp_path: Path) -> None:
    path = tmp_path / "password"

    def write(password: str) -> None:
        path.write_text(password)
        path.chmod(0o600)

    write("the-password-so-far")
    with redis_process(require_tool("redis-server"), tmp_path, "--requirepass", "the-password-so-far") as process:
        where = {"url": process.url, "password_file": str(path)}
        async with in_process(registry=where, tenants={"default": {"requests_per_minute": 1000}}) as stack:
            await hit(stack)
            gateway = stack.app.state.gateway
            before = gateway.current.stores
            async with redis.asyncio.from_url(process.url, password="the-password-so-far") as admin:
                await admin.config_set("requirepass", "the-password-from-now-on")
                await gateway.reload(gateway.settings)
                assert gateway.current.stores is before, "the password file is unchanged"
                write("the-password-from-now-on")
                await gateway.reload(gateway.settings)
                await admin.client_kill_filter(_type="normal", skipme=True)
            counted = stack.metric("registry_ops_total", op="quota_hit", result="ok")
            await hit(stack)
            assert stack.metric("registry_ops_total", op="quota_hit", result="ok") > counted
            connections = before.registry.redis.pool._available_connections
            await eventually(lambda: not any(one.is_connected for one in connections))


async def test_unreadable_entry_is_a_miss(shared_redis: RedisProcess, ops: Ops) -> None:
    async with redis.asyncio.from_url(shared_redis.url) as raw:
        await raw.set(f"{KEY_PREFIX}broken", b"{not json")
        await raw.set(f"{KEY_PREFIX}other", b'{"cache_id": "x"}')
    store = redis_registry(shared_redis, ops)
    assert await store.get_many(["broken", "other"]) == [None, None]
    assert ("get", "unreadable") in ops
    await store.aclose()


async def test_frozen_redis_costs_one_timeout(own_redis: RedisProcess, ops: Ops) -> None:
    timeout_s, others = 0.5, 40
    store = redis_registry(own_redis, ops, timeout_s)
    await store.put_many({"key": (stored := entry())})
    own_redis.freeze()
    started = time.monotonic()
    assert await store.get_many(["key"]) == [None]
    for _ in range(others // 2):
        await store.get_many(["key"])
        await store.put_many({"key": entry()})
    assert time.monotonic() - started < 0.2 * others * timeout_s, "the circuit is open: later calls return at once"
    assert ops[1:] == [("get", "timeout"), *[("get", "skipped"), ("put", "skipped")] * (others // 2)]
    own_redis.thaw()
    await eventually_found(store, "key", stored)
    await store.aclose()


async def test_dead_redis_is_a_miss_until_it_is_back(own_redis: RedisProcess, ops: Ops, tmp_path: Path) -> None:
    timeout_s = 2.0
    store = redis_registry(own_redis, ops, timeout_s)
    await store.put_many({"key": entry()})
    own_redis.kill()
    started = time.monotonic()
    assert await store.get_many(["key"]) == [None]
    await store.put_many({"key": entry()})
    await store.forget("key", entry())
    assert time.monotonic() - started < timeout_s, "a refused connection fails at once"
    assert ops[1:] == [("get", "error"), ("put", "skipped"), ("forget", "skipped")]
    await store.aclose()


async def test_cancelled_caller_leaves_the_connection_clean(shared_redis: RedisProcess) -> None:
    """The reply to a cancelled call is never taken for the reply to the next one."""
    store = redis_registry(shared_redis)
    await store.put_many({f"cancel-{number}": entry(number) for number in range(50)})
    for number in range(50):
        task = asyncio.create_task(store.get_many([f"cancel-{number}"]))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
        (found,) = await store.get_many([f"cancel-{(number + 1) % 50}"])
        assert found is not None
        assert found.num_tokens == 100 + (number + 1) % 50
    await store.aclose()


async def test_request_succeeds_with_a_frozen_redis(own_redis: RedisProcess) -> None:
    """All uses together (prefixes, quotas, a budget) cost one timeout."""
    budget = {"name": "spent", "when": {"budget": {"tier": "large", "tokens": 1000}}, "then": {"name": "fixed"}}
    tenants = {"default": {"requests_per_minute": 1000, "tokens_per_minute": 1_000_000}}
    policy = {"name": "rules", "rules": [budget]}
    async with in_process(registry={"url": own_redis.url}, policy=policy, tenants=tenants) as stack:
        await hit(stack)
        before = num_ops(stack, "timeout")
        own_redis.freeze()
        reply = await stack.chat()
        assert text(reply) == right_answer(stack.small, MESSAGES)
        assert (await stack.http.get("/livez")).status_code == 200
        assert (await stack.http.get("/readyz")).status_code == 200
        assert num_ops(stack, "timeout") == before + 1
        assert report(await stack.escalate())["path"] == "mapped", "a handoff needs no registry"
        own_redis.thaw()


async def test_gateway_starts_without_redis(tmp_path: Path) -> None:
    async with in_process(registry={"url": "redis://127.0.0.1:9/0"}) as stack:
        assert text(await stack.chat()) == right_answer(stack.small, MESSAGES)


async def hit(stack: Stack) -> None:
    """Repeat until the prompt is found: on a busy machine an operation may time out."""
    before = stack.metric("prefix_lookup_hits_total", tier="small")
    async with asyncio.timeout(20):
        while stack.metric("prefix_lookup_hits_total", tier="small") == before:
            await stack.chat()


def num_ops(stack: Stack, result: str) -> float:
    return sum(stack.metric("registry_ops_total", op=op, result=result) for op in OPERATIONS)


async def eventually_found(store: Registry, key: str, expected: Entry) -> None:
    found: list[Entry | None] = []

    async def poll() -> None:
        while found[-1:] != [expected]:
            found.extend(await store.get_many([key]))
            await asyncio.sleep(0.02)

    await asyncio.wait_for(poll(), 8)


async def test_probe_survives_any_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client library may raise undocumented exceptions."""
    monkeypatch.setattr("gateway.state.redis.CIRCUIT", CIRCUIT.model_copy(update={"open_s": 0.1}))
    failures: list[Exception] = [RuntimeError("no running loop"), ValueError("not a reply")]

    async def ping() -> None:
        if failures:
            raise failures.pop()

    async def fail() -> str:
        raise ConnectionError("gone")

    async def work() -> str:
        return "done"

    shared = SharedRedis("redis://127.0.0.1:9", timeout_s=5.0)
    shared.client.ping = ping  # type: ignore[assignment]
    assert await shared.run("get", fail) is None
    await eventually(lambda: shared.is_available, within_s=20)
    assert await shared.run("get", work) == "done"
    await shared.aclose()
