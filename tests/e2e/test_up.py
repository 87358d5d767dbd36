"""`kvrelay up`: however it ends, no process and no shared memory is left."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.running import START_S, Client, eventually, is_alive, segments, settings_of
from tools import family as commands
from workers.families import Family

ROOT = Path(__file__).parents[2]


class Up:
    """`kvrelay up --config` as a process."""

    def __init__(self, settings: dict[str, Any], home: Path):
        self.settings = settings
        config = commands.write(settings, home / "kvrelay.yaml")
        self.output, self.errors = home / "output", home / "errors"
        with self.output.open("wb") as output, self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tools.cli", "up", "--config", str(config)],
                cwd=ROOT,
                env=os.environ | {"KVRELAY_HOME": str(home)},
                stdout=output,
                stderr=errors,
            )

    @property
    def children(self) -> set[int]:
        """The ids of its running child processes."""
        stats = [path.read_text() for path in Path("/proc").glob("[0-9]*/stat") if is_alive(int(path.parent.name))]
        by_pid = {int(stat.split()[0]): int(stat.rpartition(")")[2].split()[1]) for stat in stats}
        return {pid for pid, parent in by_pid.items() if parent == self.process.pid}

    @property
    def worker(self) -> int:
        """The process id of its only worker."""
        (worker,) = (pid for pid in self.children if b"workers" in Path(f"/proc/{pid}/cmdline").read_bytes())
        return worker

    @property
    def segments(self) -> list[Path]:
        return [path for name in self.settings["workers"] for path in segments(name)]

    def wait_for_output(self, words: str) -> None:
        eventually(lambda: words in self.output.read_text() or self.process.poll() is not None, f"it prints {words!r}")
        assert words in self.output.read_text(), self.errors.read_text()

    def wait(self) -> int:
        return self.process.wait(START_S)


@contextmanager
def up(settings: dict[str, Any], home: Path) -> Iterator[Up]:
    """Run it. Afterwards no process and no shared memory is left, however it ended."""
    home.mkdir(parents=True, exist_ok=True)
    started = Up(settings, home)
    children: set[int] = set()
    try:
        yield started
        children = started.children
    finally:
        started.process.kill()
        started.process.wait()
    eventually(lambda: not any(is_alive(pid) for pid in children), "its children have ended")
    eventually(lambda: not started.segments, "its shared memory is gone")


def one_worker(family: Family) -> dict[str, Any]:
    """Settings of a stack of one worker, on new ports each time and with the same worker id."""
    settings = settings_of(family, "up")
    small = next(iter(settings["workers"].items()))
    deadlines = settings["deadlines"] | {"worker_poll_s": 0.2}
    return settings | {"tiers": settings["tiers"][:1], "workers": dict([small]), "deadlines": deadlines}


@pytest.fixture
def alone(family: Family) -> dict[str, Any]:
    return one_worker(family)


def test_two_stacks_side_by_side(family: Family, tmp_path: Path) -> None:
    """Their workers have the same id. Neither touches the other's memory."""
    with up(one_worker(family), tmp_path / "one") as one, up(one_worker(family), tmp_path / "other") as other:
        # 1. Each prints a curl command that works.
        for kvrelay in (one, other):
            kvrelay.wait_for_output("Ctrl-C stops everything")
        url, body = curl_line(one.output.read_text())
        with Client(url.removesuffix("/v1/chat/completions")) as client:
            first = client.post(json.loads(body))
            assert first.status == 200
            assert client.http.get("/metrics").status_code == 200

            # 2. The other is stopped while its worker is dead. It leaves nothing, and removes only what is its own.
            assert len(one.segments) == 2, "one of each"
            assert not any(segment.stat().st_mode & 0o077 for segment in one.segments)
            children = other.children
            os.kill(other.worker, signal.SIGKILL)
            other.process.send_signal(signal.SIGTERM)
            assert other.wait() == 0
            assert "stopped" in other.output.read_text()
            assert not [pid for pid in children if is_alive(pid)]
            (segment,) = one.segments
            assert client.post(json.loads(body)).text == first.text

            # 3. A killed worker is started again.
            children = one.children
            os.kill(one.worker, signal.SIGKILL)
            eventually(lambda: not client.tiers["small"], "the gateway has noticed")
            assert client.post(json.loads(body)).status == 503
            eventually(lambda: client.tiers["small"], "it was started again")
            assert client.post(json.loads(body)).text == first.text
        assert len(one.children & children) == 1, "only the gateway is the same"
        assert len(one.segments) == 1 and one.segments != [segment]

        # 4. Killed with SIGKILL, it takes its children with it.
        children = one.children
        assert len(children) == 2
        one.process.kill()
        eventually(lambda: not any(is_alive(pid) for pid in children), "its children have ended")


def curl_line(output: str) -> tuple[str, str]:
    """Return URL and body of the curl command in the output."""
    (line,) = (line for line in output.splitlines() if line.strip().startswith("curl "))
    words = shlex.split(line)
    assert words[:2] == ["curl", "-s"] and words[3:6] == ["-H", "content-type: application/json", "-d"]
    return words[2], words[6]


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGINT], ids=lambda ending: ending.name)
def test_signal_during_startup_stops_everything(alone: dict[str, Any], tmp_path: Path, ending: signal.Signals) -> None:
    with up(alone, tmp_path) as kvrelay:
        kvrelay.wait_for_output("starting")
        eventually(lambda: len(kvrelay.children) == 2, "its children run")
        children = kvrelay.children
        kvrelay.process.send_signal(ending)
        assert kvrelay.wait() == 0
        assert not [pid for pid in children if is_alive(pid)]


def of_gateway(settings: dict[str, Any]) -> int:
    return int(settings["server"]["port"])


def of_worker(settings: dict[str, Any]) -> int:
    return int(next(iter(settings["workers"].values()))["url"].rpartition(":")[2])


@pytest.mark.parametrize("port", [of_gateway, of_worker])
def test_taken_port_is_reported(alone: dict[str, Any], tmp_path: Path, port: Callable[[dict[str, Any]], int]) -> None:
    with socket.create_server(("127.0.0.1", port(alone))), up(alone, tmp_path) as kvrelay:
        assert kvrelay.wait() == 1
        assert re.search(rf"kvrelay up: port {port(alone)} of 127.0.0.1 is taken", kvrelay.errors.read_text())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"workers": {}}, "names no workers; expected workers"),
        ({"workers": {"lost": {"tier": "small"}}}, "workers.lost needs a url"),
        ({"workers": {"lost": {"url": "http://127.0.0.1:99999"}}}, "workers.lost needs a url"),
        ({"server": 8000}, "server"),
        ({"polizy": {}}, "polizy: unknown key; known: tiers"),
        ({"admin": {"key_file": "nowhere"}}, "admin.key_file: .*nowhere"),
    ],
)
def test_invalid_configuration_is_reported(
    alone: dict[str, Any], tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    with up(alone | changes, tmp_path) as kvrelay:
        assert kvrelay.wait() == 1
        assert re.search(f"kvrelay up: .*{says}", kvrelay.errors.read_text())
        assert "Traceback" not in kvrelay.errors.read_text()


def test_worker_that_fails_to_start_is_reported(alone: dict[str, Any], tmp_path: Path) -> None:
    (worker,) = alone["workers"].values()
    with up(alone | {"workers": {"broken-one": worker | {"num_threads": 0}}}, tmp_path) as kvrelay:
        assert kvrelay.wait() == 1
        errors = kvrelay.errors.read_text()
        reason = "num_threads.*greater than or equal to 1"
        assert re.search(f"kvrelay up: broken-one ended with status 2(.|\n)*{reason}", errors)


@pytest.mark.parametrize("command", ["demo", "bench"])
def test_signal_stops_a_command_and_its_stack(command: str, tmp_path: Path) -> None:
    """SIGTERM, or SIGINT although it was ignored at the start, as in a shell's background job."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", "tools.cli", command, "--family", "tiny"],
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(scratch)},
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    logs = "kvrelay-*/*.log"
    eventually(lambda: any(scratch.glob(logs)) or process.poll() is not None, "its stack is being started")
    process.send_signal(signal.SIGTERM if command == "demo" else signal.SIGINT)
    _, errors = process.communicate(timeout=START_S)
    assert (process.returncode, errors) == (130, b"stopped\n")
    assert not list(scratch.iterdir())


@pytest.mark.parametrize("command", ["demo", "bench"])
def test_missing_output_folder_is_reported_before_measuring(command: str, tmp_path: Path) -> None:
    arguments = [sys.executable, "-m", "tools.cli", command, "--json", str(tmp_path / "none" / "table.json")]
    ended = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, timeout=START_S)
    assert ended.returncode == 2
    assert "there is no folder" in ended.stderr
