"""A whole stack as child processes: the workers of a config file, and the gateway before them.

    with Stack(config, secret_file) as stack:
        stack.wait_ready(say)
        ...                         # stack.url answers

Leaving the block stops every part, and removes what a killed worker left in shared memory. Children are told to die
with this process, so that not even SIGKILL leaves one behind.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from workers.api.addresses import family_of, http_url
from workers.api.yaml_file import YamlUnusable, read_yaml

Say = Callable[[str], None]

STOP_GRACE_S = 10.0
START_S = 300.0  # vLLM takes longest
POLL_S = 0.1
STOPPING = (signal.SIGINT, signal.SIGTERM)
PROBE_TIMEOUT_S = 1.0
# Workers of one machine have as many threads each as it has cores. By default a thread of GNU OpenMP that waits for
# another spins for milliseconds, on the core that the other one needs; so it spins for less than one and then sleeps.
SHARED_CORES = {"GOMP_SPINCOUNT": "30000"}


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


def port_is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Whether nobody listens there. An address that is no good for another reason is its server's to complain about."""
    with closing(socket.socket(family_of(host))) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.errno != errno.EADDRINUSE
    return True


def stop_on_signals() -> None:
    """SIGINT and SIGTERM raise `KeyboardInterrupt`, so that whatever is open is closed. A shell starts a job in the
    background with SIGINT ignored; this undoes that too."""
    for number in STOPPING:
        signal.signal(number, _interrupt)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@contextmanager
def held_back() -> Iterator[None]:
    """SIGINT and SIGTERM wait for the end of the block: one between a child's start and its being noted would leave it
    running. Threads other than the main one get no signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = {number: signal.signal(number, lambda number, _: came.append(number)) for number in STOPPING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if came:
        signal.raise_signal(came[0])


def rotate(logs: Sequence[Path]) -> None:
    """Each log begins anew; that of the run before is kept as `NAME.log.1`, and no older one."""
    for log in logs:
        if log.exists():
            log.replace(log.with_name(f"{log.name}.1"))


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
        """Whether it takes calls; a gateway, whether it has a worker in every tier."""
        address = urlsplit(self.url)
        # Not by httpx, whose first call imports much: an interrupt in the midst of that costs the exit status.
        with closing(HTTPConnection(address.hostname or "", address.port, timeout=PROBE_TIMEOUT_S)) as connection:
            try:
                connection.request("GET", "/readyz")
                reply = connection.getresponse()
                return reply.status == 200 and all(json.loads(reply.read()).get("tiers", {}).values())
            except (OSError, HTTPException, ValueError):
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
    """Starts what `config` (a kvrelay.yaml) describes. Logs go to `folder`. Raises `StackError` for a file that does
    not say which workers there are, and where."""

    def __init__(self, config: Path, secret_file: Path, folder: Path):
        self.config = config
        self.folder = folder
        self._settings = _read(config)
        told = {"KVRELAY_SECRET_FILE": str(secret_file.resolve()), "PYTHONUNBUFFERED": "1"}
        self._environment = SHARED_CORES | os.environ | told
        self.workers: dict[str, Child] = {}
        self.gateway: Child | None = None

    @property
    def url(self) -> str:
        server = self._settings.get("server", {})
        return http_url(str(server.get("host", "127.0.0.1")), server.get("port", 8000))

    @property
    def children(self) -> list[Child]:
        return [*([self.gateway] if self.gateway else []), *self.workers.values()]

    def __enter__(self) -> Stack:
        """Raises `StackError` where an address is taken: whoever listens there would be taken for ours."""
        self._check_addresses()
        self.folder.mkdir(parents=True, exist_ok=True)
        rotate([self._log_of(name) for name in (*self._settings["workers"], "gateway")])
        try:
            for worker_id in self._settings["workers"]:
                self.start_worker(worker_id)
            with held_back():
                self.gateway = self._child("gateway", ["gateway", "--config", str(self.config)], self.url)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Within the grace all have ended, and left nothing; a second signal does not break that off."""
        until = time.monotonic() + STOP_GRACE_S
        with held_back():
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
        with held_back():
            self.workers[worker_id] = self._child(worker_id, arguments, url)
        return self.workers[worker_id]

    def wait_ready(self, say: Say, timeout_s: float = START_S) -> None:
        """Until every part takes calls, and the gateway has seen every tier. Raises `StackError` for a part that ends
        or takes too long."""
        waiting = [*self.workers.values(), *([self.gateway] if self.gateway else [])]
        until = time.monotonic() + timeout_s
        while waiting:
            for child in list(waiting):
                if child.ended:
                    code = child.process.returncode
                    raise StackError(f"{child.name} ended with status {code}; its log ends:\n{child.log_tail()}")
                if child.is_ready():
                    waiting.remove(child)
                    say(f"{child.name} is ready")
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

    def _check_addresses(self) -> None:
        urls = {worker_id: worker["url"] for worker_id, worker in self._settings["workers"].items()}
        for name, url in (urls | {"gateway": self.url}).items():
            host, port = urlsplit(url).hostname or "127.0.0.1", urlsplit(url).port or 80
            if not port_is_free(port, host):
                raise StackError(f"port {port} of {host} is taken; {name} is to listen there ({self.config})")

    def _child(self, name: str, arguments: list[str], url: str) -> Child:
        arguments = [*arguments, "--die-with-parent", str(os.getpid())]
        return Child(name, arguments, url, self._log_of(name), self._environment)

    def _log_of(self, name: str) -> Path:
        return self.folder / f"{name}.log"


def _read(config: Path) -> dict[str, Any]:
    """What a stack needs of the file; the processes that it starts check the rest."""
    try:
        content: Any = read_yaml(config)
    except YamlUnusable as error:
        raise StackError(str(error)) from error
    if not isinstance(content, dict) or not isinstance(content.get("server", {}), dict):
        raise StackError(f"{config} must hold a mapping with tiers, workers and, if need be, server: {{host, port}}")
    workers = content.get("workers")
    if not isinstance(workers, dict) or not workers:
        raise StackError(f"{config} names no workers; needed is workers: {{small-0: {{tier, model, url}}, ...}}")
    for name, worker in workers.items():
        if not isinstance(worker, dict) or not _is_address(worker.get("url")):
            raise StackError(f"{config}: workers.{name} needs a url like http://127.0.0.1:8101")
    return content


def _is_address(url: Any) -> bool:
    try:
        return isinstance(url, str) and urlsplit(url).hostname is not None and urlsplit(url).port is not None
    except ValueError:
        return False


def segments(worker_id: str) -> list[Path]:
    """What workers of that name have in shared memory, or had when they were killed."""
    return list(Path("/dev/shm").glob(f"kvrelay-{os.getuid()}-{worker_id}-*"))


def remove_segments(worker_id: str) -> None:
    """Unlink what a worker that was killed left in shared memory; not what a worker of that name in another stack has
    there, which holds a lock on it for as long as it lives."""
    for path in segments(worker_id):
        try:
            with path.open("rb") as segment:
                fcntl.flock(segment, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink(missing_ok=True)
        except (BlockingIOError, FileNotFoundError):
            continue
