"""A server process and its children: start it, wait until it answers, measure it, stop it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
POLL_S = 0.05
END_S = 10.0
PLAIN = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # ignores proxies of the environment


class DidNotStart(RuntimeError):
    """The server exited, or did not answer in time. The message holds the end of its log."""


class Server:
    """A running server. CPU and memory are those of its whole process group."""

    def __init__(self, process: subprocess.Popen[bytes], port: int):
        self._process = process
        self.port = port

    @property
    def cpu_s(self) -> float:
        """User and system time so far, including children that have exited and been waited for."""
        return sum(_cpu_ticks(stat) for stat in self._stats()) / TICKS_PER_S

    @property
    def rss_mib(self) -> float:
        return sum(int(stat[RSS]) for stat in self._stats()) * PAGE_BYTES / 2**20

    def _stats(self) -> list[list[str]]:
        group = str(self._process.pid)
        return [stat for stat in _all_stats() if stat[GROUP] == group]


# Fields of /proc/PID/stat behind the command's name, counted from 0: proc_pid_stat(5).
GROUP, UTIME, STIME, CUTIME, CSTIME, RSS = 2, 11, 12, 13, 14, 21


def _cpu_ticks(stat: Sequence[str]) -> int:
    return sum(int(stat[field]) for field in (UTIME, STIME, CUTIME, CSTIME))


def _all_stats() -> Iterator[list[str]]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                yield (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # the process has exited


@contextmanager
def running(
    command: Sequence[str], *, port: int, ready_path: str, log: Path, env: Mapping[str, str], timeout_s: float = 240.0
) -> Iterator[Server]:
    """Run a server for the duration of the block, once `ready_path` answers 200. Raises `DidNotStart`."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env={**os.environ, **env}, start_new_session=True
        )
    try:
        _wait_for(process, f"http://127.0.0.1:{port}{ready_path}", log, timeout_s)
        yield Server(process, port)
    finally:
        _end(process)


def free_port() -> int:
    """Return a port that is not in use."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _wait_for(process: subprocess.Popen[bytes], url: str, log: Path, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not _answers(url):
        if process.poll() is not None or time.monotonic() > deadline:
            output = log.read_text(encoding="utf-8", errors="replace")[-2000:]
            raise DidNotStart(f"{process.args!r} did not answer at {url}:\n{output}")
        time.sleep(POLL_S)


def _answers(url: str) -> bool:
    try:
        with PLAIN.open(url, timeout=2) as reply:
            return bool(reply.status == 200)
    except OSError:  # includes urllib's errors
        return False


def _end(process: subprocess.Popen[bytes]) -> None:
    """Stop the process group with SIGTERM, then with SIGKILL."""
    for number, timeout_s in ((signal.SIGTERM, END_S), (signal.SIGKILL, END_S)):
        try:
            os.killpg(process.pid, number)
            process.wait(timeout_s)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue
    process.wait(END_S)
