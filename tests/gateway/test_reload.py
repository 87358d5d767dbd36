"""Reloading: validated as a whole, swapped at once, and no request is lost."""

from __future__ import annotations

import asyncio
import gc
import signal
import threading
import weakref
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from gateway.reload import ConfigSource, reload, reloading
from gateway.settings import Settings, from_values
from gateway.snapshot import Gateway
from tests.gateway.stack import MESSAGES, Stack, eventually, in_process, live_stack, report, right_answer, text, values
from tests.gateway.test_process import configured, gateway, workers
from tools.fake_worker import FAKE_SECRET
from workers.api.config import SettingsError

KEY = "of sixteen and more characters"
SMALL, LARGE = ({"name": "fixed", "tier": tier} for tier in ("small", "large"))


def of(stack: Stack) -> Gateway:
    gateway: Gateway = stack.app.state.gateway
    return gateway


async def test_request_keeps_its_configuration() -> None:
    async with live_stack(policy=SMALL, deadlines={"request_s": 20.0}) as stack:
        stack.small.token_s = 0.15
        under_way = asyncio.create_task(stack.chat())
        await eventually(lambda: bool(stack.small.requests("chat")))
        before = of(stack).current
        changed = before.settings.model_dump() | {"policy": LARGE, "deadlines": {"request_s": 10.0}}
        changed["workers"] = {"large-0": changed["workers"]["large-0"]}
        changed["tiers"] = [{"name": "large", "model": "fake-large"}]
        asyncio.run_coroutine_threadsafe(of(stack).reload(from_values(changed)), loop_of(stack)).result(5)
        assert report(await stack.chat())["tier"] == "large", "later requests see the new one"
        assert (await stack.chat(model="small")).status_code == 404
        assert not under_way.done()
        assert text(await under_way) == right_answer(stack.small, MESSAGES)
        http: Any = before.parts.fleet.tiers["small"].workers["small-0"].client._http
        await eventually(lambda: not http._open)
        shown = of(stack).metrics.registry.get_sample_value
        await eventually(lambda: shown("kvrelay_circuit_state", {"target": "small-0"}) is None)
        assert 'target="small-0"' not in (await stack.http.get("/metrics")).text


def loop_of(stack: Stack) -> asyncio.AbstractEventLoop:
    """The event loop that the gateway runs on."""
    watch = of(stack)._watch
    assert watch is not None
    return watch.get_loop()


async def test_unchanged_worker_keeps_its_state(stack: Stack) -> None:
    first = await stack.chat()
    small = of(stack).parts.fleet.tiers["small"].workers["small-0"]
    await of(stack).reload(from_values(values(policy=LARGE)))
    assert of(stack).parts.fleet.tiers["small"].workers["small-0"] is small
    assert report(await stack.chat(kvrelay={"policy": "confidence"}))["path"] == "exact", "the registry is the same"
    await of(stack).reload(from_values(values(limits={"max_messages": 3})))
    again = of(stack).parts.fleet.tiers["small"].workers["small-0"]
    assert again is not small and again.epoch == small.epoch and again.info == small.info
    assert (await stack.chat([*MESSAGES, *MESSAGES])).status_code == 413
    assert report(first)["tier"] == report(await stack.chat())["tier"] == "small"
    assert stack.metric("config_generation") == of(stack).current.generation == 3


async def test_new_worker_is_checked_before_use() -> None:
    """An unchecked worker would leave its tier out of /readyz."""
    only_small = {"tiers": values()["tiers"][:1], "workers": {"small-0": values()["workers"]["small-0"]}}
    async with in_process(**only_small) as stack:
        await of(stack).reload(from_values(values()))
        assert (await stack.http.get("/readyz")).json()["tiers"] == {"small": True, "large": True}
        assert report(await stack.chat(model="large"))["tier"] == "large"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"server": {"port": 8001}}, "server: cannot be changed while the gateway runs"),
        ({"server": {"host": "0.0.0.0"}}, "0.0.0.0 is reachable from other machines"),
        ({"secret_file": "other"}, "secret_file: cannot be changed while the gateway runs"),
    ],
)
async def test_unsafe_or_restart_only_change_is_rejected(stack: Stack, changes: dict[str, Any], message: str) -> None:
    before = of(stack).current
    with pytest.raises(SettingsError, match=message):
        await of(stack).reload(from_values(values(policy=LARGE, **changes)))
    assert of(stack).current is before
    assert report(await stack.chat())["policy"] == "confidence"


async def test_workers_change_while_secrets_are_unreadable(tmp_path: Path) -> None:
    key, password = (tmp_path / name for name in ("key", "password"))
    for path in (key, password):
        path.write_text(KEY)
        path.chmod(0o600)
    registry = {"url": "redis://127.0.0.1:9", "password_file": str(password)}
    async with in_process(admin={"key_file": str(key)}, registry=registry) as stack:
        for path in (key, password):
            path.unlink()
        with pytest.raises(SettingsError, match="admin.key_file: cannot read"):
            await of(stack).reload(of(stack).settings)
        await of(stack).set_discovered({"large-1": of(stack).settings.workers["large-0"]})
        assert set(of(stack).parts.fleet.tiers["large"].workers) == {"large-0", "large-1"}
        told_by_admin = await stack.http.get("/admin/state", headers={"authorization": f"Bearer {KEY}"})
        assert told_by_admin.status_code == 200


async def test_slow_read_delays_no_request_and_the_latest_wins(stack: Stack) -> None:
    may_be_read, policies = threading.Event(), iter([LARGE, SMALL])

    def read() -> Settings:
        policy = next(policies)
        assert policy is SMALL or may_be_read.wait(5)
        return from_values(values(policy=policy))

    source = ConfigSource(Path("nowhere"), read)
    readings = [asyncio.create_task(reload(of(stack), source)) for _ in range(2)]
    assert report(await stack.chat())["policy"] == "confidence"
    may_be_read.set()
    assert await asyncio.gather(*readings) == [None, None]
    assert report(await stack.chat())["tier"] == "small"
    assert of(stack).current.generation == 3


@pytest.mark.parametrize("error", [SettingsError("policy.name: unknown"), RuntimeError("a bug")])
async def test_rejected_configuration_is_counted(stack: Stack, error: Exception) -> None:
    def read() -> Any:
        raise error

    await reload(of(stack), ConfigSource(Path("nowhere"), read))
    result = "rejected" if isinstance(error, SettingsError) else "failed"
    assert stack.metric("config_reload_total", result=result) == 1
    assert stack.metric("config_generation") == 1


def test_changed_secret_is_rejected() -> None:
    held = {"secret_file": "first"}
    source = ConfigSource(Path("nowhere"), lambda: from_values(values()), lambda settings: dict(held))
    source.read()
    held["secret_file"] = "second"
    with pytest.raises(SettingsError, match="secret_file: it and its secret cannot be changed"):
        source.read()


ONLY_LARGE = {"tiers": values()["tiers"][1:], "workers": {"large-0": values()["workers"]["large-0"]}}


async def test_worker_added_again_is_still_measured(stack: Stack) -> None:
    with of(stack).current:
        for changes in (ONLY_LARGE, {}):
            await of(stack).reload(from_values(values(policy=LARGE, **changes)))
    await asyncio.gather(*of(stack)._retiring)
    assert 'kvrelay_circuit_state{target="small-0"} 0.0' in (await stack.http.get("/metrics")).text


async def test_old_fleet_is_garbage_collected(stack: Stack) -> None:
    await of(stack).reload(from_values(values(policy=LARGE)))
    second = weakref.ref(of(stack).parts.fleet)
    await of(stack).reload(from_values(values(policy=SMALL)))
    await eventually(lambda: gc.collect() >= 0 and second() is None)


class Silent(httpx.AsyncBaseTransport):
    """The transport to a worker that never answers."""

    is_asked = is_closed = False

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.is_asked = True
        await asyncio.Event().wait()
        raise AssertionError

    async def aclose(self) -> None:
        self.is_closed = True


async def test_cancelled_reload_leaves_nothing_open() -> None:
    silent = Silent()
    more = values()["workers"] | {"large-1": {"tier": "large", "url": "http://large-1"}}
    async with in_process({"large-1": silent}) as stack:
        loading = asyncio.create_task(of(stack).reload(from_values(values(workers=more))))
        await eventually(lambda: silent.is_asked)
        loading.cancel()
        await asyncio.wait({loading})
        assert loading.cancelled() and silent.is_closed
        assert of(stack).current.generation == 1
        assert "large-1" not in (await stack.http.get("/metrics")).text
        assert report(await stack.chat())["tier"] == "small", "shared objects stay open"


async def test_stop_can_be_cancelled_while_the_watch_hangs() -> None:
    other, let_go = Gateway(from_values(values()), FAKE_SECRET, {}), asyncio.Event()

    async def stubborn() -> None:
        while not let_go.is_set():
            try:
                await let_go.wait()
            except asyncio.CancelledError:
                continue

    other._watch = asyncio.create_task(stubborn())
    await asyncio.sleep(0)
    stopping = asyncio.create_task(other.stop())
    await asyncio.sleep(0.05)
    stopping.cancel()
    await asyncio.wait({stopping}, timeout=5)
    let_go.set()
    assert stopping.cancelled()
    await other.stop()


async def test_change_during_start_is_applied(stack: Stack, tmp_path: Path) -> None:
    path = tmp_path / "kvrelay.yaml"
    path.write_text("before")
    source = ConfigSource(path, lambda: from_values(values(policy=LARGE)))
    source.read()
    path.write_text("after")
    async with reloading(of(stack), source):
        await eventually(lambda: stack.metric("config_reload_total", result="ok") == 1, within_s=20)
    assert stack.metric("config_generation") == 2


async def test_failed_watch_is_counted_and_restarted(
    stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.reload.REWATCH_S", 0.1)
    path = tmp_path / "mounted" / "kvrelay.yaml"
    async with reloading(of(stack), ConfigSource(path, lambda: from_values(values(policy=LARGE)))):
        await eventually(lambda: stack.metric("config_reload_total", result="failed") >= 1)
        path.parent.mkdir()
        path.write_text("there")
        await eventually(lambda: stack.metric("config_generation") == 2, within_s=20)


async def test_reload_under_load_loses_no_request(tmp_path: Path) -> None:
    with workers() as (small, _, section):
        config = configured(tmp_path, workers=section, policy=SMALL)
        with gateway(config) as (process, url):
            async with httpx.AsyncClient(base_url=url, timeout=20) as http:
                small.token_s = 0.01
                load = asyncio.create_task(keep_asking(http))
                await eventually(lambda: bool(small.requests("chat")), within_s=20)
                replace(config, {"policy": LARGE})
                await exported(http, "kvrelay_config_generation 2.0")
                tiers = await load
                assert tiers[0] == "small" and tiers[-1] == "large"
                replace(config, {"policy": {"name": "best"}})
                await exported(http, 'kvrelay_config_reload_total{result="rejected"} 1.0')
                assert await tier_of(http) == "large", "the old configuration stays"
                process.send_signal(signal.SIGHUP)
                await exported(http, 'kvrelay_config_reload_total{result="rejected"} 2.0')
                replace(config, {"policy": SMALL})
                await exported(http, "kvrelay_config_generation 3.0")
                assert await tier_of(http) == "small"


async def test_rotated_secret_is_rejected_not_ignored(tmp_path: Path) -> None:
    with workers() as (_, _, section):
        config = configured(tmp_path, workers=section, policy=SMALL)
        with gateway(config) as (process, url):
            async with httpx.AsyncClient(base_url=url, timeout=20) as http:
                (tmp_path / "secret").write_text(FAKE_SECRET[::-1])
                process.send_signal(signal.SIGHUP)
                await exported(http, 'kvrelay_config_reload_total{result="rejected"} 1.0')
                assert await tier_of(http) == "small", "the old configuration stays"
                (tmp_path / "secret").write_text(FAKE_SECRET)
                replace(config, {"policy": LARGE})
                await exported(http, "kvrelay_config_generation 2.0")


def replace(config: Path, changes: dict[str, Any]) -> None:
    """Replace the file by another one, as editors do."""
    beside = config.with_name("new.yaml")
    beside.write_text(yaml.safe_dump(yaml.safe_load(config.read_text()) | changes))
    beside.replace(config)


async def exported(http: httpx.AsyncClient, line: str) -> None:
    async with asyncio.timeout(20):
        while line not in (await http.get("/metrics")).text:  # noqa: ASYNC110 - another process sets it
            await asyncio.sleep(0.05)


async def tier_of(http: httpx.AsyncClient) -> str:
    reply = await http.post("/v1/chat/completions", json={"model": "auto", "messages": MESSAGES})
    return str(report(reply)["tier"])


async def keep_asking(http: httpx.AsyncClient) -> list[str]:
    """Send four requests at a time until the other tier answers. Return the tiers that answered. Raises any error."""
    tiers: list[str] = []
    async with asyncio.timeout(20):
        while tiers.count("large") < 8:
            tiers += await asyncio.gather(*(tier_of(http) for _ in range(4)))
    return tiers
