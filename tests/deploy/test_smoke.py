"""The parts of deploy/smoke.sh: its root file system, and its shutdown. Run the whole by hand: it starts two models."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from deploy.composed import REPOSITORY

CHECK = """
import os, socket, subprocess
from pathlib import Path
from deploy import composed, smoke
before = set(os.listdir("/etc"))
stack = composed.load(smoke.prepare())
smoke.lay_out(stack)
assert {"kvrelay", "prometheus", "redis", "hosts"} <= set(os.listdir("/etc")) and before <= set(os.listdir("/etc"))
assert socket.gethostbyname("worker-small") == "127.0.0.1"
assert Path("/run/secrets/cluster-secret").stat().st_mode & 0o777 == 0o600
assert "small-0" in Path("/etc/kvrelay/kvrelay.yaml").read_text()
shm = os.statvfs("/dev/shm")
assert os.listdir("/dev/shm") == [] and shm.f_blocks * shm.f_frsize == 1280 * 2**20
assert Path("/prometheus").is_dir() and "scrape_interval: 1s" in Path("/etc/prometheus/prometheus.yml").read_text()
with socket.create_server(("gateway", 8000)) as gateway:
    healthy = ["python", "/opt/deploy/healthy", "http://gateway:9/readyz"]
    assert subprocess.run(healthy, env={"PATH": smoke.BIN}).returncode == 1
print("as the containers see it")
"""


def test_root_has_the_containers_paths_and_names(require_tool: Callable[[str], str]) -> None:
    shown = sorted(os.listdir("/etc"))
    options = ["--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
    as_root = [] if os.getuid() == 0 else ["--map-root-user"]
    command = [require_tool("unshare"), *as_root, *options, sys.executable, "-c", CHECK]
    ran = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.endswith("as the containers see it\n")
    assert sorted(os.listdir("/etc")) == shown, "this machine is unchanged"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_ending_the_smoke_test_ends_its_services(
    number: signal.Signals, require_tool: Callable[[str], str], tmp_path: Path
) -> None:
    require_tool("unshare")
    service = tmp_path / "python"  # in place of smoke.py: it does not exit by itself
    service.write_text("#!/bin/sh\nsleep 600 &\necho started\nwait\n")
    service.chmod(0o755)
    environment = os.environ | {"PYTHON": str(service)}
    # A shell's background jobs ignore SIGINT, and so would their children.
    command = ["env", "--default-signal=INT", str(REPOSITORY / "deploy" / "smoke.sh")]
    smoke = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    with smoke:
        assert smoke.stdout is not None and smoke.stdout.readline() == b"started\n"
        smoke.send_signal(number)
        assert smoke.stdout.read() == b"", "the pipe closes with the last process that holds it"
