"""Parts of the commands that need no running stack: verdicts, logs, signals, options, exit statuses."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml

from tools import family
from tools.commands import bench, up
from tools.commands.demo import verdict
from tools.output import run_command, write_results
from tools.stack import Child, Stack, StackError, deferred_signals, free_ports
from workers.settings import ENGINES

GOOD: dict[str, Any] = {"turn": 1, "path": "mapped", "handoff_ttft_ms": 10.0, "full_prefill_ttft_ms": 40.0}


@pytest.mark.parametrize(
    ("turns", "status", "says"),
    [
        ([GOOD], 0, ""),
        ([GOOD, GOOD | {"turn": 2, "full_prefill_ttft_ms": None}], 1, "not measured against a full prefill: turn 2"),
        ([GOOD | {"handoff_ttft_ms": None}], 1, "not measured against a full prefill: turn 1"),
        ([GOOD, GOOD | {"turn": 2, "handoff_ttft_ms": 41.0}], 1, "no faster than a full prefill: turn 2"),
        ([GOOD, GOOD | {"turn": 2, "path": "fallback:no_time"}], 1, "fell back to a full prefill: turn 2"),
        ([GOOD | {"path": "exact"}], 1, "no turn was handed over"),
        ([GOOD, GOOD | {"path": "exact", "handoff_ttft_ms": None, "full_prefill_ttft_ms": None}], 0, ""),
    ],
)
def test_demo_verdict(turns: list[dict[str, Any]], status: int, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert verdict(turns) == status
    assert says in capsys.readouterr().err


def test_engine_option_is_for_the_large_model() -> None:
    folders = {"small": "s", "large": "l", "bundle": "b"}
    workers = family.configuration("tiny", folders, engine="vllm")["workers"]
    assert [worker.get("engine", family.DEFAULT_ENGINE) for worker in workers.values()] == ["transformers", "vllm"]


def test_logs_are_rotated_once_per_start(tmp_path: Path) -> None:
    """The children exit at once, because the configuration is invalid, and log why."""
    (port,) = free_ports(1)
    config = tmp_path / "kvrelay.yaml"
    config.write_text(yaml.safe_dump({"workers": {"w": {"url": f"http://127.0.0.1:{port}"}}, "server": {"port": port}}))
    log = tmp_path / "logs" / "w.log"
    log.parent.mkdir()
    log.write_text("the run before\n")
    log.with_name("w.log.1").write_text("an older one\n")
    stack = Stack(config, tmp_path / "secret", log.parent)
    with pytest.raises(StackError, match="ended with status"), stack:
        stack.wait_ready(lambda line: None)
    assert log.with_name("w.log.1").read_text() == "the run before\n"
    assert "the run before" not in log.read_text()


def test_signals_wait_until_a_child_is_recorded() -> None:
    came: list[str] = []
    before = signal.signal(signal.SIGTERM, lambda *_: came.append("signal"))
    try:
        with deferred_signals():
            signal.raise_signal(signal.SIGTERM)
            came.append("recorded")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert came == ["recorded", "signal"]


def test_second_signal_does_not_abort_a_stop(tmp_path: Path) -> None:
    config = tmp_path / "kvrelay.yaml"
    config.write_text(yaml.safe_dump({"workers": {"twice": {"url": "http://127.0.0.1:1"}}}))
    stack = Stack(config, tmp_path / "secret", tmp_path)
    impatient = SimpleNamespace(terminate=lambda: None, wait_or_kill=lambda _: signal.raise_signal(signal.SIGINT))
    stack.workers["twice"] = cast(Child, impatient)
    left = Path(f"/dev/shm/kvrelay-{os.getuid()}-twice-{os.getpid()}")
    left.touch()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background has it ignored
    try:
        with pytest.raises(KeyboardInterrupt):
            stack.stop()
    finally:
        signal.signal(signal.SIGINT, before)
    assert not left.exists()


@pytest.fixture
def signal_handlers() -> Iterator[None]:
    """Restore the signal handlers after the test."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("signal_handlers")
def test_unusable_home_is_reported_before_models_are_made(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVRELAY_HOME", "/dev/null/home")
    assert up.main(["--port", str(free_ports(1)[0])]) == 1
    out, complaint = capfd.readouterr()
    assert out == "" and complaint.startswith("kvrelay up: ") and len(complaint.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--engine", "lvvm"], "invalid choice: 'lvvm' (choose from 'transformers', 'vllm')"),
        (["--config", "kvrelay.yaml", "--port", "9000"], "--family and --port cannot be combined with --config"),
        (["--config", "kvrelay.yaml", "--family", "tiny"], "--family and --port cannot be combined with --config"),
    ],
)
def test_up_rejects_conflicting_options(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        up.main(arguments)
    assert says in capsys.readouterr().err
    assert sorted(family.ENGINES) == sorted(ENGINES)


@pytest.mark.usefixtures("signal_handlers")
@pytest.mark.parametrize("port", [-1, 0, 65_536])
def test_up_rejects_an_invalid_port(port: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert up.main(["--port", str(port)]) == 1
    assert f"--port {port}: must be from 1 to 65535" in capsys.readouterr().err


@pytest.mark.usefixtures("signal_handlers")
def test_two_stacks_on_one_port_do_not_share_a_folder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Not even before the first one listens."""
    port, folder = free_ports(1)[0], tmp_path / "run"
    monkeypatch.setenv("KVRELAY_HOME", str(tmp_path))
    (folder / str(port)).mkdir(parents=True)
    with (folder / str(port) / "lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert up.main(["--port", str(port), "--family", "tiny"]) == 1
    assert f"another kvrelay up has port {port}" in capsys.readouterr().err
    assert [path.name for path in folder.rglob("*")] == [str(port), "lock"]


class EndingStack:
    """A stack whose worker exits at these times, and then its gateway."""

    def __init__(self, *at_s: float):
        self.now_s, self.num_started = 0.0, 0
        self._at_s = iter(at_s)
        status = SimpleNamespace(returncode=1)
        self.gateway, self._worker = (SimpleNamespace(name=name, log="its.log", process=status) for name in "gw")

    def wait_for_exit(self) -> SimpleNamespace:
        at_s = next(self._at_s, None)
        if at_s is None:
            return self.gateway
        self.now_s = at_s
        return self._worker

    def start_worker(self, name: str) -> None:
        self.num_started += 1


@pytest.mark.parametrize(
    ("at_s", "num_started", "says"),
    [
        ((0, 1, 2, 3, 4, 5), 4, "workers ended 5 times within 600 s; giving up"),
        ((0, 200, 400, 600, 800, 1000, 1200), 7, "g ended with status 1"),
    ],
)
def test_up_gives_up_on_workers_that_exit_too_often(
    at_s: tuple[float, ...], num_started: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    stack = EndingStack(*at_s)
    assert up.supervise(cast(Stack, stack), lambda: stack.now_s) == 1
    assert stack.num_started == num_started and says in capsys.readouterr().err


def interrupted() -> int:
    raise KeyboardInterrupt


def out_of_space() -> int:
    write_results("the report", Path("/dev/full"), {})
    return 0


@pytest.mark.parametrize(
    ("work", "status", "printed", "complaint"),
    [
        (lambda: 1, 1, "", ""),
        (interrupted, 130, "", "stopped\n"),
        (out_of_space, 2, "the report\n", "kvrelay x: cannot write /dev/full: No space left on device\n"),
    ],
)
def test_exit_status_of_a_command(
    work: Callable[[], int], status: int, printed: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command("kvrelay x", work) == status
    assert capsys.readouterr() == (printed, complaint)


def test_closed_output_pipe_is_not_an_error(tmp_path: Path) -> None:
    """As in `| head`. The JSON file is still written. The log comes from a pipe."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "tools.cli", "calibrate", "-", "--min-agreement", "0.5"]
    with os.fdopen(writer, "wb") as pipe:
        ended = subprocess.run(
            [*command, "--json", str(tmp_path / "out.json")],
            input=b'{"confidence": -1, "agrees": true}\n' * 40,
            stdout=pipe,
            stderr=subprocess.PIPE,
        )
    assert (ended.returncode, ended.stderr) == (141, b"")
    assert yaml.safe_load((tmp_path / "out.json").read_text())["threshold"] == -1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--repeats", "0"], "'0': must be an integer of at least 1"),
        (["--lengths", ","], "',': must be comma-separated integers of at least 64"),
        (["--json", "/"], "/ is a folder; expected a file"),
    ],
)
def test_bench_rejects_invalid_options(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(arguments)
    assert says in capsys.readouterr().err
