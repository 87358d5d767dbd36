"""A real `redis-server` on a free port, which a test may freeze and kill; and one with a replica and sentinels."""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis


@dataclass
class RedisProcess:
    port: int
    process: subprocess.Popen[bytes]

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)


@contextmanager
def redis_process(binary: str, folder: Path, *options: str) -> Iterator[RedisProcess]:
    port = _free_port()
    command = [binary, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder), *options]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        _wait_for(port)
        yield RedisProcess(port, process)
    finally:
        process.kill()
        process.wait(10)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _wait_for(port: int, within_s: float = 10.0) -> None:
    until = time.monotonic() + within_s
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            assert time.monotonic() < until, "redis-server did not start"
            time.sleep(0.01)


@dataclass
class Watched:
    """`master`, its replica, and the sentinels that put that in its place."""

    master: RedisProcess
    url: str


SENTINEL = """
port {port}
bind 127.0.0.1
dir {folder}
sentinel monitor kvrelay 127.0.0.1 {master} 2
sentinel down-after-milliseconds kvrelay 500
sentinel failover-timeout kvrelay 2000
"""


@contextmanager
def watched_redis(binary: str, folder: Path) -> Iterator[Watched]:
    with ExitStack() as processes:
        master = processes.enter_context(redis_process(binary, folder, "--repl-diskless-sync-delay", "0"))
        replica = processes.enter_context(redis_process(binary, folder, "--replicaof", "127.0.0.1", str(master.port)))
        _wait_until(lambda: _told(replica.port, "info", "replication")["master_link_status"] == "up")
        sentinels = [processes.enter_context(sentinel(binary, folder, master.port)) for _ in range(2)]
        _wait_until(lambda: all(_knows_the_others(port) for port in sentinels))
        hosts = ",".join(f"127.0.0.1:{port}" for port in sentinels)
        yield Watched(master, f"redis+sentinel://{hosts}/kvrelay/0")


@contextmanager
def sentinel(binary: str, folder: Path, master: int) -> Iterator[int]:
    """Its port."""
    port = _free_port()
    config = folder / f"sentinel-{port}.conf"
    config.write_text(SENTINEL.format(port=port, folder=folder, master=master))
    process = subprocess.Popen([binary, str(config), "--sentinel"], stdout=subprocess.DEVNULL)
    try:
        _wait_for(port)
        yield port
    finally:
        process.kill()
        process.wait(10)


def _knows_the_others(sentinel: int) -> bool:
    told = _told(sentinel, "sentinel_master", "kvrelay")
    return bool(told["num-slaves"] == told["num-other-sentinels"] == 1)


def _told(port: int, command: str, *arguments: str) -> dict[str, Any]:
    with redis.Redis(port=port) as client:
        return dict(getattr(client, command)(*arguments))


def _wait_until(holds: Callable[[], bool], within_s: float = 20.0) -> None:
    until = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < until, "the servers did not find each other"
        time.sleep(0.05)
