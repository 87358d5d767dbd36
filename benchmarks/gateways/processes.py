"""A server process with all its children: started, watched until it answers, what it costs, ended."""

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
PLAIN = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # nobody stands between


class DidNotStart(RuntimeError):
    """A server that ended, or did not answer in time; with the end of what it said."""


class Server:
    """A running one. What it costs is that of its whole process group."""

    def __init__(self, process: subprocess.Popen[bytes], port: int):
        self._process = process
        self.port = port

    @property
    def cpu_s(self) -> float:
        """User and system time so far. Children that have ended count where their parent has waited for them."""
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
                continue  # it has ended meanwhile


@contextmanager
def running(
    command: Sequence[str], *, port: int, ready_path: str, log: Path, env: Mapping[str, str], within_s: float = 240.0
) -> Iterator[Server]:
    """The server, from when `ready_path` answers 200 until the end of the block. Raises `DidNotStart`."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env={**os.environ, **env}, start_new_session=True
        )
    try:
        _wait_for(process, f"http://127.0.0.1:{port}{ready_path}", log, within_s)
        yield Server(process, port)
    finally:
        _end(process)


def free_port() -> int:
    """One that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _wait_for(process: subprocess.Popen[bytes], url: str, log: Path, within_s: float) -> None:
    until = time.monotonic() + within_s
    while not _answers(url):
        if process.poll() is not None or time.monotonic() > until:
            said = log.read_text(encoding="utf-8", errors="replace")[-2000:]
            raise DidNotStart(f"{process.args!r} did not answer at {url}:\n{said}")
        time.sleep(POLL_S)


def _answers(url: str) -> bool:
    try:
        with PLAIN.open(url, timeout=2) as reply:
            return bool(reply.status == 200)
    except OSError:  # urllib's errors among them
        return False


def _end(process: subprocess.Popen[bytes]) -> None:
    """The whole group: politely, then not."""
    for sign, within_s in ((signal.SIGTERM, END_S), (signal.SIGKILL, END_S)):
        try:
            os.killpg(process.pid, sign)
            process.wait(within_s)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue
    process.wait(END_S)
