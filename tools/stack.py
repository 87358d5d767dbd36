"""A stack as child processes: the workers of a configuration file and the gateway before them.

    with Stack(config, secret_file, folder) as stack:
        stack.wait_ready(say)
        ...                         # stack.url answers

Leaving the block stops every process and removes the shared memory of killed workers. Children die with this process,
so that not even SIGKILL leaves one behind.
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
from workers.api.config import SettingsError, read_yaml

Say = Callable[[str], None]

STOP_GRACE_S = 10.0
START_S = 300.0  # vLLM takes longest
POLL_S = 0.1
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
PROBE_TIMEOUT_S = 1.0
# Each worker has as many threads as the machine has cores. A waiting GNU OpenMP thread spins for milliseconds by
# default, on a core that another worker needs. This makes it sleep after less than one.
SHARED_CORES = {"GOMP_SPINCOUNT": "30000"}


class StackError(RuntimeError):
    """A process of the stack did not start; the message names it and shows the end of its log."""


# Ports and signals


def free_ports(count: int) -> list[int]:
    """Return ports of 127.0.0.1 that are free now."""
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def port_is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Return whether the port is unused. An address that is invalid for another reason counts as free: its server
    reports the error."""
    with closing(socket.socket(family_of(host))) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.errno != errno.EADDRINUSE
    return True


def stop_on_signals() -> None:
    """Raise `KeyboardInterrupt` on SIGINT and SIGTERM, so that open contexts are closed. A shell starts background jobs
    with SIGINT ignored; this undoes that too."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    for number in STOP_SIGNALS:
        signal.signal(number, interrupt)


@contextmanager
def deferred_signals() -> Iterator[None]:
    """Defer SIGINT and SIGTERM to the end of the block. A signal between starting a child and recording it would leave
    the child running. Threads other than the main one receive no signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pending: list[int] = []
    before = {number: signal.signal(number, lambda number, _: pending.append(number)) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if pending:
        signal.raise_signal(pending[0])


# Processes


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
        """Return whether it accepts calls; for a gateway, whether every tier has a usable worker."""
        address = urlsplit(self.url)
        # Not httpx, whose first call imports much: an interrupt in the middle of that costs the exit status.
        with closing(HTTPConnection(address.hostname or "", address.port, timeout=PROBE_TIMEOUT_S)) as connection:
            try:
                connection.request("GET", "/readyz")
                reply = connection.getresponse()
                return reply.status == 200 and all(json.loads(reply.read()).get("tiers", {}).values())
            except (OSError, HTTPException, ValueError):
                return False

    def log_tail(self, lines: int = 12) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def terminate(self) -> None:
        """Ask it to stop, even while frozen."""
        if not self.ended:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()

    def wait_or_kill(self, deadline: float) -> None:
        """Wait until `deadline` (monotonic), then kill it."""
        try:
            self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Stack:
    """Starts the processes of `config`, a kvrelay.yaml. Logs go to `folder`. Raises `StackError` for a file without
    workers or without their addresses."""

    def __init__(self, config: Path, secret_file: Path, folder: Path):
        self.config = config
        self.folder = folder
        self._settings = _read(config)
        own = {"KVRELAY_SECRET_FILE": str(secret_file.resolve()), "PYTHONUNBUFFERED": "1"}
        self._environment = SHARED_CORES | os.environ | own
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
        """Start every process. Raises `StackError` if an address is taken: its owner would be mistaken for ours."""
        self._check_addresses()
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in (*self._settings["workers"], "gateway"):  # keep the log of the previous run, and no older one
            if (log := self._log_of(name)).exists():
                log.replace(log.with_name(f"{log.name}.1"))
        try:
            for worker_id in self._settings["workers"]:
                self.start_worker(worker_id)
            with deferred_signals():
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
        """Stop every process within the grace period and remove what they left. A second signal does not abort it."""
        deadline = time.monotonic() + STOP_GRACE_S
        with deferred_signals():
            for child in self.children:
                child.terminate()
            for child in self.children:
                child.wait_or_kill(deadline)
            for worker in self.workers:
                remove_segments(worker)

    def start_worker(self, worker_id: str) -> Child:
        """Start one worker, or start it again after it ended."""
        arguments = ["workers", "--config", str(self.config), "--worker", worker_id]
        url = self._settings["workers"][worker_id]["url"]
        with deferred_signals():
            self.workers[worker_id] = self._child(worker_id, arguments, url)
        return self.workers[worker_id]

    def wait_ready(self, say: Say, timeout_s: float = START_S) -> None:
        """Wait until every process accepts calls and the gateway has found every tier. Raises `StackError` if one ends
        or takes too long."""
        waiting = [*self.workers.values(), *([self.gateway] if self.gateway else [])]
        deadline = time.monotonic() + timeout_s
        while waiting:
            for child in list(waiting):
                if child.ended:
                    code = child.process.returncode
                    raise StackError(f"{child.name} ended with status {code}; its log ends:\n{child.log_tail()}")
                if child.is_ready():
                    waiting.remove(child)
                    say(f"{child.name} is ready")
            if waiting and time.monotonic() > deadline:
                names = ", ".join(child.name for child in waiting)
                raise StackError(f"not ready after {timeout_s:.0f} s: {names}; logs are in {self.folder}")
            time.sleep(POLL_S)

    def wait_for_exit(self) -> Child:
        """Block until a process ends by itself, and return it."""
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
                raise StackError(f"port {port} of {host} is taken; {name} needs it ({self.config})")

    def _child(self, name: str, arguments: list[str], url: str) -> Child:
        arguments = [*arguments, "--die-with-parent", str(os.getpid())]
        return Child(name, arguments, url, self._log_of(name), self._environment)

    def _log_of(self, name: str) -> Path:
        return self.folder / f"{name}.log"


def _read(config: Path) -> dict[str, Any]:
    """Read and check what the stack needs of the file; its processes check the rest. Raises `StackError`."""
    try:
        content: Any = read_yaml(config)
    except SettingsError as error:
        raise StackError(str(error)) from error
    if not isinstance(content, dict) or not isinstance(content.get("server", {}), dict):
        raise StackError(f"{config} must be a mapping with tiers, workers and optionally server: {{host, port}}")
    workers = content.get("workers")
    if not isinstance(workers, dict) or not workers:
        raise StackError(f"{config} names no workers; expected workers: {{small-0: {{tier, model, url}}, ...}}")
    for name, worker in workers.items():
        if not isinstance(worker, dict) or not _is_address(worker.get("url")):
            raise StackError(f"{config}: workers.{name} needs a url like http://127.0.0.1:8101")
    return content


def _is_address(url: Any) -> bool:
    try:
        return isinstance(url, str) and urlsplit(url).hostname is not None and urlsplit(url).port is not None
    except ValueError:
        return False


# Shared memory


def segments(worker_id: str) -> list[Path]:
    """Return the shared memory segments of workers with this name, running or killed."""
    return list(Path("/dev/shm").glob(f"kvrelay-{os.getuid()}-{worker_id}-*"))


def remove_segments(worker_id: str) -> None:
    """Unlink the segments of killed workers. A running worker of the same name in another stack holds a lock on its
    own, which are kept."""
    for path in segments(worker_id):
        try:
            with path.open("rb") as segment:
                fcntl.flock(segment, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink(missing_ok=True)
        except (BlockingIOError, FileNotFoundError):
            continue
