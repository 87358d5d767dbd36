"""`kvrelay up`, and how it ends: whatever ends it, no process and no shared memory of it is left."""

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
    """`kvrelay up --config`, in a process of its own."""

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
        """The processes that it has started and not seen to the end."""
        stats = [path.read_text() for path in Path("/proc").glob("[0-9]*/stat") if is_alive(int(path.parent.name))]
        by_pid = {int(stat.split()[0]): int(stat.rpartition(")")[2].split()[1]) for stat in stats}
        return {pid for pid, parent in by_pid.items() if parent == self.process.pid}

    @property
    def worker(self) -> int:
        """The process of its only worker."""
        (worker,) = (pid for pid in self.children if b"workers" in Path(f"/proc/{pid}/cmdline").read_bytes())
        return worker

    @property
    def segments(self) -> list[Path]:
        return [path for name in self.settings["workers"] for path in segments(name)]

    def says(self, words: str) -> None:
        """Waits until it has said so."""
        eventually(lambda: words in self.output.read_text() or self.process.poll() is not None, f"it says {words!r}")
        assert words in self.output.read_text(), self.errors.read_text()

    def ends(self) -> int:
        return self.process.wait(START_S)


@contextmanager
def up(settings: dict[str, Any], home: Path) -> Iterator[Up]:
    """Nothing of it is left afterwards, however it was ended."""
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
    """A stack of one worker, which is the sooner there; on new ports each time, and always with the same worker id."""
    settings = settings_of(family, "up")
    small = next(iter(settings["workers"].items()))
    deadlines = settings["deadlines"] | {"worker_poll_s": 0.2}
    return settings | {"tiers": settings["tiers"][:1], "workers": dict([small]), "deadlines": deadlines}


@pytest.fixture
def alone(family: Family) -> dict[str, Any]:
    return one_worker(family)


def test_two_side_by_side(family: Family, tmp_path: Path) -> None:
    """Their workers have the same id, and neither touches what is the other's."""
    with up(one_worker(family), tmp_path / "one") as one, up(one_worker(family), tmp_path / "other") as other:
        # 1. Each prints a line to paste, which is answered.
        for kvrelay in (one, other):
            kvrelay.says("Ctrl-C stops everything")
        url, body = curl_line(one.output.read_text())
        with Client(url.removesuffix("/v1/chat/completions")) as client:
            first = client.post(json.loads(body))
            assert first.status == 200
            assert client.http.get("/metrics").status_code == 200

            # 2. The other is stopped while its worker lies dead. It leaves nothing, and takes nothing away.
            assert len(one.segments) == 2, "one of each"
            assert not any(segment.stat().st_mode & 0o077 for segment in one.segments)
            children = other.children
            os.kill(other.worker, signal.SIGKILL)
            other.process.send_signal(signal.SIGTERM)
            assert other.ends() == 0
            assert "stopped" in other.output.read_text()
            assert not [pid for pid in children if is_alive(pid)]
            (segment,) = one.segments
            assert client.post(json.loads(body)).text == first.text

            # 3. A worker that is killed is started again.
            children = one.children
            os.kill(one.worker, signal.SIGKILL)
            eventually(lambda: not client.tiers["small"], "the gateway knows that it is dead")
            assert client.post(json.loads(body)).status == 503
            eventually(lambda: client.tiers["small"], "it was started again")
            assert client.post(json.loads(body)).text == first.text
        assert len(one.children & children) == 1, "the gateway is the same, the worker is new"
        assert len(one.segments) == 1 and one.segments != [segment]

        # 4. Killed itself, it takes its children with it.
        children = one.children
        assert len(children) == 2
        one.process.kill()
        eventually(lambda: not any(is_alive(pid) for pid in children), "its children have ended")


def curl_line(output: str) -> tuple[str, str]:
    """The URL and the body of the command that is to be pasted."""
    (line,) = (line for line in output.splitlines() if line.strip().startswith("curl "))
    words = shlex.split(line)
    assert words[:2] == ["curl", "-s"] and words[3:6] == ["-H", "content-type: application/json", "-d"]
    return words[2], words[6]


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGINT], ids=lambda ending: ending.name)
def test_ended_while_it_starts(alone: dict[str, Any], tmp_path: Path, ending: signal.Signals) -> None:
    with up(alone, tmp_path) as kvrelay:
        kvrelay.says("starting")
        eventually(lambda: len(kvrelay.children) == 2, "its children run")
        children = kvrelay.children
        kvrelay.process.send_signal(ending)
        assert kvrelay.ends() == 0
        assert not [pid for pid in children if is_alive(pid)]


def of_gateway(settings: dict[str, Any]) -> int:
    return int(settings["server"]["port"])


def of_worker(settings: dict[str, Any]) -> int:
    return int(next(iter(settings["workers"].values()))["url"].rpartition(":")[2])


@pytest.mark.parametrize("port", [of_gateway, of_worker])
def test_a_port_that_is_taken(alone: dict[str, Any], tmp_path: Path, port: Callable[[dict[str, Any]], int]) -> None:
    with socket.create_server(("127.0.0.1", port(alone))), up(alone, tmp_path) as kvrelay:
        assert kvrelay.ends() == 1
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
def test_a_file_that_is_no_configuration(
    alone: dict[str, Any], tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    with up(alone | changes, tmp_path) as kvrelay:
        assert kvrelay.ends() == 1
        assert re.search(f"kvrelay up: .*{says}", kvrelay.errors.read_text())
        assert "Traceback" not in kvrelay.errors.read_text()


def test_a_worker_that_does_not_start_is_told(alone: dict[str, Any], tmp_path: Path) -> None:
    (worker,) = alone["workers"].values()
    with up(alone | {"workers": {"broken-one": worker | {"num_threads": 0}}}, tmp_path) as kvrelay:
        assert kvrelay.ends() == 1
        told = kvrelay.errors.read_text()
        reason = "num_threads.*greater than or equal to 1"
        assert re.search(f"kvrelay up: broken-one ended with status 2(.|\n)*{reason}", told)


@pytest.mark.parametrize("command", ["demo", "bench"])
def test_a_command_with_a_stack_of_its_own_is_stopped(command: str, tmp_path: Path) -> None:
    """SIGTERM, or Ctrl-C in a shell's background job, which ignores SIGINT until told otherwise."""
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
def test_a_file_that_cannot_be_written_is_told_before_anything_is_measured(command: str, tmp_path: Path) -> None:
    arguments = [sys.executable, "-m", "tools.cli", command, "--json", str(tmp_path / "none" / "table.json")]
    ended = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, timeout=START_S)
    assert ended.returncode == 2
    assert "there is no folder" in ended.stderr
