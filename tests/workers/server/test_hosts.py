"""A handoff between two hosts: namespaces of their own for network and shared memory, joined by a veth pair."""

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
    """Another host: what runs by its `launcher` has its own network and its own /dev/shm. `address` is its own, `ours`
    is this side's."""

    def __init__(self) -> None:
        number = next(_numbers) % 250
        self.address, self.ours = f"10.231.{number}.2", f"10.231.{number}.1"
        self._holder = subprocess.Popen(["unshare", "--net", "--mount", "sleep", "infinity"])
        self._link = f"kvr{os.getpid()}"
        pid = self._holder.pid
        wait_for(lambda: Path(f"/proc/{pid}/comm").read_text().strip() == "sleep", 10)  # it has its namespaces now
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
        """The link goes with the namespace."""
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
    """Workers of a configuration in which the small one stands on the other host and lends over TCP."""
    common = {"num_threads": 1, "pool_bytes": 4 * 2**20, "grace_s": 0.1}
    small = {"model": str(small_folder), "host": host.address, "tcp": {"host": host.address}}
    workers = {"far-small": small | common, "near-large": {"model": str(folder), "bundles": [str(bundle)]} | common}
    (tmp_path / "kvrelay.yaml").write_text(yaml.safe_dump({"workers": workers}))
    (tmp_path / "secret").write_text(SECRET)
    (tmp_path / "secret").chmod(0o600)
    started: list[Process] = []

    def begin(worker_id: str, *arguments: str, launcher: tuple[str, ...] = ()) -> Process:
        started.append(Process(tmp_path, worker_id, *arguments, launcher=launcher))
        return started[-1]

    yield begin
    for process in started:
        process.popen.kill()
        process.popen.wait()


async def test_a_prefix_moves_between_two_hosts(host: Host, start: Callable[..., Process]) -> None:
    small = start("far-small", launcher=host.launcher)
    url = (await asyncio.to_thread(lambda: small.ready))["url"]
    large = start("near-large", "--peer", f"far-small={url}")
    await asyncio.to_thread(lambda: large.ready)
    async with WorkerClient(url, SECRET) as source, large.client() as target:
        there, here = await source.info(), await target.info()
        assert [export.kind for export in there.exports] == ["shm", "tcp"]
        assert there.site and here.site and there.site.host != here.site.host
        read = await source.prefill(PrefillRequest(messages=[SYSTEM, QUESTION], tenant_salt=SALT), timeout_s=60)
        asked = transfer_request(read.cache_id, source_worker="far-small", num_tokens=read.num_tokens - 16)
        moved = await target.transfer(asked, timeout_s=60)
        assert moved.transport == "tcp" and moved.num_tokens == read.num_tokens - 16
        host.break_link()
        with pytest.raises((DeadlineExceeded, WorkerUnavailable)):
            await target.transfer(asked.model_copy(update={"deadline_ms": 1_500.0}), timeout_s=30)
