"""A whole stack as child processes: the workers of a config file, and the gateway before them.

    with Stack(config, secret_file) as stack:
        stack.wait_ready(say)
        ...                         # stack.url answers

Leaving the block stops the gateway first, then the workers, and removes what a killed worker left in shared memory.
Children are told to die with this process, so that not even SIGKILL leaves one behind.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import yaml

Say = Callable[[str], None]

STOP_GRACE_S = 10.0
POLL_S = 0.1


class StackError(RuntimeError):
    """A part of the stack did not start; the message names it and shows the end of its log."""


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that nobody listens on just now."""
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def port_is_free(port: int) -> bool:
    with closing(socket.socket()) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


class Child:
    """One process of the stack, with its log."""

    def __init__(self, name: str, arguments: Sequence[str], url: str, log: Path, environment: dict[str, str]):
        self.name = name
        self.url = url
        self.log = log
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/readyz", timeout=1.0, trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False

    def log_tail(self, lines: int = 12) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def ask_to_stop(self) -> None:
        if not self.ended:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()

    def wait_or_kill(self, until: float) -> None:
        try:
            self.process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Stack:
    """Starts what `config` (a kvrelay.yaml) describes. Logs go to `folder`."""

    def __init__(self, config: Path, secret_file: Path, folder: Path):
        self.config = config
        self.folder = folder
        self._settings: dict[str, Any] = yaml.safe_load(config.read_text())
        self._environment = os.environ | {"KVRELAY_SECRET_FILE": str(secret_file), "PYTHONUNBUFFERED": "1"}
        self.workers: dict[str, Child] = {}
        self.gateway: Child | None = None

    @property
    def url(self) -> str:
        server = self._settings.get("server", {})
        return f"http://{server.get('host', '127.0.0.1')}:{server.get('port', 8000)}"

    @property
    def children(self) -> list[Child]:
        return [*([self.gateway] if self.gateway else []), *self.workers.values()]

    def __enter__(self) -> Stack:
        self.folder.mkdir(parents=True, exist_ok=True)
        for worker_id in self._settings["workers"]:
            self.start_worker(worker_id)
        self.gateway = self._child("gateway", ["gateway", "--config", str(self.config)], self.url)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        until = time.monotonic() + STOP_GRACE_S
        for child in self.children:
            child.ask_to_stop()
        for child in self.children:
            child.wait_or_kill(until)
        for worker in self.workers:
            remove_segments(worker)

    def start_worker(self, worker_id: str) -> Child:
        """Start one worker, or start it again after it ended."""
        arguments = ["workers", "--config", str(self.config), "--worker", worker_id]
        url = self._settings["workers"][worker_id]["url"]
        self.workers[worker_id] = self._child(worker_id, arguments, url)
        return self.workers[worker_id]

    def wait_ready(self, say: Say, timeout_s: float = 120.0) -> None:
        """Until every part answers its readiness probe. Raises `StackError` for one that ends or takes too long."""
        waiting = [*self.workers.values(), *([self.gateway] if self.gateway else [])]
        until = time.monotonic() + timeout_s
        while waiting:
            for child in list(waiting):
                if child.is_ready():
                    waiting.remove(child)
                    say(f"{child.name} is ready")
                elif child.ended:
                    code = child.process.returncode
                    raise StackError(f"{child.name} ended with status {code}; its log ends:\n{child.log_tail()}")
            if waiting and time.monotonic() > until:
                names = ", ".join(child.name for child in waiting)
                raise StackError(f"not ready after {timeout_s:.0f} s: {names}; logs are in {self.folder}")
            time.sleep(POLL_S)

    def wait_for_an_end(self) -> Child:
        """Block until some part ends by itself; that part."""
        while True:
            for child in self.children:
                if child.ended:
                    return child
            time.sleep(0.5)

    def _child(self, name: str, arguments: list[str], url: str) -> Child:
        return Child(name, [*arguments, "--die-with-parent"], url, self.folder / f"{name}.log", self._environment)


def remove_segments(worker_id: str) -> None:
    """Unlink what a worker that was killed left in shared memory."""
    for path in Path("/dev/shm").glob(f"kvrelay-{os.getuid()}-{worker_id}-*"):
        path.unlink(missing_ok=True)
