"""A handoff between two hosts: separate network and shared-memory namespaces, joined by a veth pair."""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from tests.workers.server.support import QUESTION, SALT, SECRET, SYSTEM, transfer_request
from tests.workers.server.test_process import Process, wait_for
from workers.api.client import WorkerClient
from workers.api.errors import DeadlineExceeded, WorkerUnavailable
from workers.api.schemas import PrefillRequest

pytestmark = [pytest.mark.hosts, pytest.mark.slow]

_numbers = itertools.count(os.getpid() % 200)


class Host:
    """Another host: a command run by `launcher` has its own network and /dev/shm. `address` is the host's end of the
    link, `ours` this side's."""

    def __init__(self) -> None:
        number = next(_numbers) % 250
        self.address, self.ours = f"10.231.{number}.2", f"10.231.{number}.1"
        self._holder = subprocess.Popen(["unshare", "--net", "--mount", "sleep", "infinity"])
        self._link = f"kvr{os.getpid()}"
        pid = self._holder.pid
        wait_for(lambda: Path(f"/proc/{pid}/comm").read_text().strip() == "sleep", 10)  # in its namespaces
        self.launcher = ("nsenter", f"--target={pid}", "--net", "--mount")
        run("ip", "link", "add", self._link, "type", "veth", "peer", "name", "eth0", "netns", str(pid))
        run("ip", "address", "add", f"{self.ours}/30", "dev", self._link)
        run("ip", "link", "set", self._link, "up")
        for command in (
            ("ip", "address", "add", f"{self.address}/30", "dev", "eth0"),
            ("ip", "link", "set", "eth0", "up"),
            ("ip", "link", "set", "lo", "up"),
            ("mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", "/dev/shm"),
        ):
            run(*self.launcher, *command)

    def break_link(self) -> None:
        run("ip", "link", "set", self._link, "down")

    def close(self) -> None:
        """End the holder process, which removes the namespace and its link."""
        self._holder.kill()
        self._holder.wait()


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def host() -> Iterator[Host]:
    host = Host()
    yield host
    host.close()


@pytest.fixture
def start(
    host: Host, tmp_path: Path, folder: Path, small_folder: Path, bundle: Path
) -> Iterator[Callable[..., Process]]:
    """Start workers; the small one runs on the other host and serves its blocks over TCP."""
    common = {"num_threads": 1, "pool_bytes": 4 * 2**20, "grace_s": 0.1}
    small = {"model": str(small_folder), "host": host.address, "tcp": {"host": host.address}}
    workers = {"far-small": small | common, "near-large": {"model": str(folder), "bundles": [str(bundle)]} | common}
    (tmp_path / "kvrelay.yaml").write_text(yaml.safe_dump({"workers": workers}))
    (tmp_path / "secret").write_text(SECRET)
    (tmp_path / "secret").chmod(0o600)
    processes: list[Process] = []

    def start(worker_id: str, *arguments: str, launcher: tuple[str, ...] = ()) -> Process:
        processes.append(Process(tmp_path, worker_id, *arguments, launcher=launcher))
        return processes[-1]

    yield start
    for process in processes:
        process.popen.kill()
        process.popen.wait()


async def test_handoff_between_hosts_uses_tcp_and_fails_without_link(host: Host, start: Callable[..., Process]) -> None:
    small = start("far-small", launcher=host.launcher)
    url = (await asyncio.to_thread(lambda: small.ready))["url"]
    large = start("near-large", "--peer", f"far-small={url}")
    await asyncio.to_thread(lambda: large.ready)
    async with WorkerClient(url, SECRET) as source, large.client() as target:
        source_info, target_info = await source.info(), await target.info()
        assert [export.kind for export in source_info.exports] == ["shm", "tcp"]
        assert source_info.site and target_info.site and source_info.site.host != target_info.site.host
        prefilled = await source.prefill(PrefillRequest(messages=[SYSTEM, QUESTION], tenant_salt=SALT), timeout_s=60)
        request = transfer_request(prefilled.cache_id, source_worker="far-small", num_tokens=prefilled.num_tokens - 16)
        moved = await target.transfer(request, timeout_s=60)
        assert moved.transport == "tcp" and moved.num_tokens == prefilled.num_tokens - 16
        host.break_link()
        with pytest.raises((DeadlineExceeded, WorkerUnavailable)):
            await target.transfer(request.model_copy(update={"deadline_ms": 1_500.0}), timeout_s=30)
