"""Workers as real processes: start, handoff over shared memory, SIGTERM and SIGKILL."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.serving import has_ipv6
from tests.workers.engines import tiny
from tests.workers.server.support import QUESTION, SALT, SECRET, SYSTEM, chat_request, content, transfer_request, until
from tests.workers.server.test_mapped import HEAD, TAIL, replay_answer
from workers.api.client import WorkerClient
from workers.api.errors import CacheNotFound, WorkerUnavailable
from workers.api.schemas import PrefillRequest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
START_S = 120.0
TALK = [SYSTEM, QUESTION]
NUM = 8


class Process:
    """A worker started by the command line that users run."""

    def __init__(self, home: Path, worker_id: str, *arguments: str, launcher: tuple[str, ...] = ()):
        self.ready_file = home / f"{worker_id}.json"
        self.log = home / f"{worker_id}.log"
        command = ["-m", "workers", "--config", str(home / "kvrelay.yaml"), "--worker", worker_id, "--port", "0"]
        environ = os.environ | {"KVRELAY_SECRET_FILE": str(home / "secret"), "OMP_NUM_THREADS": "1"}
        with self.log.open("w") as log:
            self.popen = subprocess.Popen(
                [*launcher, sys.executable, *command, "--ready-file", str(self.ready_file), *arguments],
                cwd=ROOT,
                env=environ,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    @property
    def ready(self) -> dict[str, Any]:
        """Wait for the ready file and return its content."""
        wait_for(lambda: self.ready_file.exists() or self.popen.poll() is not None, START_S)
        assert self.ready_file.exists(), self.log.read_text()
        ready: dict[str, Any] = json.loads(self.ready_file.read_text())
        return ready

    def client(self) -> WorkerClient:
        return WorkerClient(self.ready["url"], SECRET)

    def end(self) -> int:
        self.popen.send_signal(signal.SIGTERM)
        return self.popen.wait(30)


def wait_for(condition: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"the condition was still false after {timeout_s} s"
        time.sleep(0.02)


def segments() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob(f"kvrelay-{os.getuid()}-proc-*")}


@pytest.fixture
def home(tmp_path: Path, folder: Path, small_folder: Path, bundle: Path) -> Path:
    """A folder with the configuration of two workers and the cluster secret."""
    common = {"num_threads": 1, "pool_bytes": 4 * 2**20, "grace_s": 0.2}
    workers = {
        "proc-small": {"tier": "small", "model": str(small_folder)} | common,
        "proc-large": {"tier": "large", "model": str(folder), "bundles": [str(bundle)]} | common,
    }
    (tmp_path / "kvrelay.yaml").write_text(yaml.safe_dump({"workers": workers, "tiers": {}}))
    (tmp_path / "secret").write_text(SECRET)
    (tmp_path / "secret").chmod(0o600)
    return tmp_path


@pytest.fixture
def start(home: Path) -> Iterator[Callable[..., Process]]:
    processes: list[Process] = []

    def begin(worker_id: str, *arguments: str, **options: Any) -> Process:
        processes.append(Process(home, worker_id, *arguments, **options))
        return processes[-1]

    yield begin
    for process in processes:
        if process.popen.poll() is None:
            process.popen.kill()
            process.popen.wait()


async def test_handoff_between_processes_matches_replay(
    start: Callable[..., Process], folder: Path, small_folder: Path, bundle: Path
) -> None:
    host, in_url = ("::1", "[::1]") if has_ipv6() else ("127.0.0.1", "127.0.0.1")
    small = start("proc-small", "--host", host)
    url = await asyncio.to_thread(lambda: small.ready["url"])
    assert re.fullmatch(rf"http://{re.escape(in_url)}:\d+", url)
    large = start("proc-large", "--peer", f"proc-small={url}")
    await asyncio.to_thread(lambda: large.ready)
    async with small.client() as source, large.client() as target:
        assert (await source.info()).pid == small.popen.pid != (await target.info()).pid
        prefilled = await source.prefill(PrefillRequest(messages=TALK, tenant_salt=SALT), timeout_s=30)
        handed = prefilled.num_tokens - TAIL
        request = transfer_request(
            prefilled.cache_id, source_worker="proc-small", num_tokens=handed, native_head=HEAD, deadline_ms=20_000
        )
        moved = await target.transfer(request, timeout_s=30)
        reply = await target.chat(chat_request(TALK, cache_id=moved.cache_id, max_tokens=NUM), timeout_s=30)
    tokenizer = tiny.tokenizer()
    prompt = tokenizer.encode(
        tokenizer.apply_chat_template([m.model_dump() for m in TALK], tokenize=False, add_generation_prompt=True),
        add_special_tokens=False,
    )
    assert len(prompt) == prefilled.num_tokens
    tokens = replay_answer(folder, small_folder, bundle, prompt, handed, NUM)
    assert content(reply) == tokenizer.decode(tokens, skip_special_tokens=True)
    assert reply["kv_transfer_params"]["path"] == "mapped"
    # On SIGTERM the source finishes its answer and exits; then the target reports it as unavailable.
    await assert_drains_on_sigterm(small)
    async with large.client() as target:
        with pytest.raises(WorkerUnavailable):
            await target.transfer(request, timeout_s=30)
        assert content(await target.chat(chat_request(TALK, cache_id=moved.cache_id, max_tokens=NUM), timeout_s=30))
    assert await asyncio.to_thread(large.end) == 0
    assert not any(QUESTION.text in process.log.read_text() for process in (small, large))
    assert not segments() and not large.ready_file.exists()


async def assert_drains_on_sigterm(process: Process) -> None:
    async with process.client() as client:
        assert await client.ready()
        answering = asyncio.create_task(client.chat(chat_request(TALK, max_tokens=200), timeout_s=60))
        await asyncio.sleep(0.05)
        process.popen.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.05)
        assert not await client.ready()  # draining, and still taking calls
        reply = await answering
        assert reply["choices"][0]["finish_reason"] in ("length", "stop")
    assert await asyncio.to_thread(process.popen.wait, 30) == 0


LAUNCHER = "import subprocess, sys; subprocess.run(sys.argv[1:])"


async def test_restart_reclaims_the_memory_of_a_killed_worker(start: Callable[..., Process]) -> None:
    first = start("proc-small")
    ready = await asyncio.to_thread(lambda: first.ready)
    assert ready["pid"] == first.popen.pid
    assert f"worker proc-small ready on {ready['url']} with small" in first.log.read_text()
    async with first.client() as client:
        cache = await client.prefill(PrefillRequest(messages=TALK, tenant_salt=SALT), timeout_s=30)
    first.popen.kill()
    first.popen.wait()
    first.ready_file.unlink()
    leaked = segments()
    assert len(leaked) == 1
    second = start("proc-small", "--die-with-parent", launcher=(sys.executable, "-c", LAUNCHER))
    pid = (await asyncio.to_thread(lambda: second.ready))["pid"]
    assert len(segments()) == 1 and segments() != leaked
    async with second.client() as client:
        assert (await client.info()).epoch != cache.epoch
        with pytest.raises(CacheNotFound):
            await client.chat(chat_request(TALK, cache_id=cache.cache_id), timeout_s=30)

    # With --die-with-parent it exits with its launcher and removes its segment.
    assert pid != second.popen.pid
    second.popen.kill()
    second.popen.wait()
    await until(lambda: not Path(f"/proc/{pid}").exists(), 30)
    assert not segments()


def test_worker_does_not_start_without_its_parent(start: Callable[..., Process]) -> None:
    """The parent exited before the worker could request a parent-death signal."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(30)
    worker = start("proc-small", "--die-with-parent", str(ended.pid))
    assert worker.popen.wait(START_S) == 1
    assert "the starting process has ended" in worker.log.read_text()


@pytest.mark.parametrize(
    ("arguments", "changes", "message"),
    [
        (("--worker", "nope"), {}, "unknown worker 'nope'.*proc-large, proc-small"),
        (("--worker", "proc-small", "--config", "/no/such.yaml"), {}, "cannot read the configuration /no/such.yaml"),
        (("--worker", "proc-small"), {"KVRELAY_SECRET_FILE": ""}, "KVRELAY_SECRET_FILE"),
        (("--worker", "proc-small", "--port", "99999"), {}, "--port: .*less than or equal to 65535, got 99999"),
        (("--worker", "proc-small"), {"KVRELAY_SECRET_FILE": "/no/such"}, "/no/such"),
    ],
)
def test_invalid_settings_exit_with_one_line(
    home: Path, arguments: tuple[str, ...], changes: dict[str, str], message: str
) -> None:
    environ = os.environ | {"KVRELAY_SECRET_FILE": str(home / "secret")} | changes
    command = [sys.executable, "-m", "workers", "--config", str(home / "kvrelay.yaml"), *arguments]
    result = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 2
    assert len(result.stderr.strip().splitlines()) == 1
    assert re.search(message, result.stderr)
