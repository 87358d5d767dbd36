"""`python -m gateway` as a process: startup, ready file, shutdown, and what it never imports."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from gateway.__main__ import main
from gateway.app import create_app
from gateway.server import Server
from gateway.settings import from_values
from tests.gateway.stack import MESSAGES, eventually, fakes, right_answer, text, values
from tests.serving import free_socket, serving, url_of
from tools.fake_worker import FAKE_SECRET, FakeWorker

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


@contextmanager
def workers() -> Iterator[tuple[FakeWorker, FakeWorker, dict[str, Any]]]:
    """Two fakes behind sockets, and their section of the configuration."""
    small, large = fakes()
    with ExitStack() as stack:
        sockets = {worker: stack.enter_context(free_socket()) for worker in ("small-0", "large-0")}
        stack.enter_context(serving({sockets["small-0"]: small, sockets["large-0"]: large}))
        yield small, large, {name: {"tier": name[:5], "url": url_of(one)} for name, one in sockets.items()}


def configured(folder: Path, **changes: Any) -> Path:
    secret = folder / "secret"
    secret.write_text(FAKE_SECRET)
    secret.chmod(0o600)
    path = folder / "kvrelay.yaml"
    path.write_text(yaml.safe_dump(values(secret_file="secret", **changes)))
    return path


def command(config: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "gateway", "--config", str(config), "--port", "0", *more]


@contextmanager
def gateway(config: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process and its URL, once it listens."""
    ready = config.with_name("ready.json")
    process = subprocess.Popen(command(config, "--ready-file", str(ready)), cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        yield process, told_by(ready, process)["url"]
    finally:
        process.kill()
        process.communicate(timeout=10)


def told_by(ready: Path, process: subprocess.Popen[str], within_s: float = 30.0) -> dict[str, Any]:
    until = time.monotonic() + within_s
    while not ready.exists():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < until, "the gateway did not start"
        time.sleep(0.02)
    return dict(json.loads(ready.read_text()))


async def test_writes_ready_file_answers_and_drains_on_sigterm(tmp_path: Path) -> None:
    deadlines = {"request_s": 10.0, "decode_reserve_s": 0.5, "shutdown_grace_s": 0.6, "drain_s": 10.0}
    with workers() as (_, large, section):
        config = configured(tmp_path, workers=section, deadlines=deadlines)
        with gateway(config) as (process, url):
            assert json.loads((tmp_path / "ready.json").read_text())["pid"] == process.pid
            async with httpx.AsyncClient(base_url=url, timeout=20) as http:
                assert (await http.get("/readyz")).status_code == 200
                large.token_s = 0.3  # seven words: about two seconds
                body = {"model": "large", "messages": MESSAGES}
                under_way = asyncio.create_task(http.post("/v1/chat/completions", json=body))
                await eventually(lambda: bool(large.requests("chat")))
                process.send_signal(signal.SIGTERM)
                await asyncio.sleep(0.1)
                assert (await http.get("/readyz")).status_code == 503
                assert (await http.get("/livez")).status_code == 200, "still taken, within the grace"
                reply = await under_way
                assert text(reply) == right_answer(large, MESSAGES)
            assert process.wait(timeout=10) == 0


def test_idle_connections_outlive_those_of_clients() -> None:
    """Otherwise a request could meet a connection that is being closed."""
    kept_s = Server(create_app(from_values(values()), FAKE_SECRET), None).config.timeout_keep_alive
    assert kept_s > 60, "as load balancers do"
    assert kept_s > (httpx.Limits().keepalive_expiry or 0)


def test_sighup_during_startup_reloads_later(tmp_path: Path) -> None:
    ready = tmp_path / "ready.json"
    with free_socket() as silent:  # a worker that is looked at while the gateway starts
        section = {name: {"tier": name[:5], "url": url_of(silent)} for name in ("small-0", "large-0")}
        arguments = command(configured(tmp_path, workers=section), "--ready-file", str(ready))
        process = subprocess.Popen(arguments, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        silent.settimeout(30)
        silent.accept()[0].close()
        process.send_signal(signal.SIGHUP)
    told_by(ready, process)
    process.terminate()  # there is a grace, in which the file is read
    lines = [json.loads(line) for line in process.communicate(timeout=10)[1].splitlines()]
    assert process.returncode == 0
    assert "config_reloaded" in [line["event"] for line in lines]


async def test_ctrl_c_shuts_down_gracefully(tmp_path: Path) -> None:
    """Every log line is JSON, uvicorn's included."""
    with workers() as (_, _, section), gateway(configured(tmp_path, workers=section)) as (process, url):
        reader, writer = await asyncio.open_connection(httpx.URL(url).host, httpx.URL(url).port)
        writer.write(b"no HTTP\r\n\r\n")
        assert b" 400 " in await reader.read()
        writer.close()
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=10) == 0
        lines = [json.loads(line) for line in process.communicate()[1].splitlines()]
        assert "Invalid HTTP request received." in [line.get("message") for line in lines]


def test_dies_with_its_parent(tmp_path: Path) -> None:
    config = configured(tmp_path)
    ready = tmp_path / "ready.json"
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import subprocess, sys; subprocess.run(sys.argv[1:])",
            *command(config, "--ready-file", str(ready), "--die-with-parent"),
        ],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        child = told_by(ready, parent)["pid"]
        assert child != parent.pid
    finally:
        parent.kill()
        parent.wait(10)
    gone_by = time.monotonic() + 15
    while is_running(child):
        assert time.monotonic() < gone_by, "the gateway outlived its parent"
        time.sleep(0.05)
    assert parent.stderr is not None
    parent.stderr.close()


def test_does_not_start_without_its_parent(tmp_path: Path) -> None:
    """The parent may end before the child has asked for a signal at its end."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(30)
    arguments = command(configured(tmp_path), "--die-with-parent", str(ended.pid))
    child = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert child.returncode == 2
    assert "the parent has already exited" in child.stderr


def is_running(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policy": {"name": "best"}}, "unknown policy 'best'; known: fixed"),
        ({"server": {"host": "0.0.0.0"}}, "server.host: 0.0.0.0 is reachable from other machines"),
        ({"secret_file": "nowhere"}, "secret_file: cannot read"),
    ],
)
def test_invalid_configuration_exits_with_2(
    tmp_path: Path, changes: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = configured(tmp_path)
    config.write_text(yaml.safe_dump(yaml.safe_load(config.read_text()) | changes))
    assert main(["--config", str(config), "--port", "0"]) == 2
    assert message in capsys.readouterr().err


def test_address_in_use_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with free_socket() as taken:
        port = str(taken.getsockname()[1])
        assert main(["--config", str(configured(tmp_path)), "--port", port]) == 2
    assert f"cannot listen on 127.0.0.1 port {port}" in capsys.readouterr().err


def test_invalid_port_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", str(configured(tmp_path)), "--port", "70000"]) == 2
    assert "--port: Input should be less than or equal to 65535, got 70000" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["nowhere/ready.json", "."])
def test_unwritable_ready_file_is_named(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    ready = tmp_path / name
    assert main(["--config", str(configured(tmp_path)), "--port", "0", "--ready-file", str(ready)]) == 2
    assert f"--ready-file: cannot write {ready}; its folder must exist" in capsys.readouterr().err


IMPORT_WITHOUT = """
import importlib, importlib.abc, pkgutil, sys

class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {banned!r}:
            raise ImportError(f"{{name}} must not be imported here")

sys.meta_path.insert(0, Refuse())
import gateway, workers.api
for package in (gateway, workers.api):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
loaded = sorted(name for name in sys.modules if name.split(".")[0] == "workers")
assert all(name == "workers" or name.startswith("workers.api") for name in loaded), loaded
from gateway.app import create_app
print("imported")
"""


def test_gateway_needs_neither_torch_nor_transformers() -> None:
    script = textwrap.dedent(IMPORT_WITHOUT).format(banned=("torch", "transformers", "mappers", "numpy", "safetensors"))
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "imported", done.stderr
