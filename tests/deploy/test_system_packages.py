"""deploy/system-packages, which `make test` begins with: what it cannot install is left out, and stops nobody."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from deploy.composed import REPOSITORY


def ran(folder: Path, *, apt: int, **environment: str) -> subprocess.CompletedProcess[str]:
    """As root of a machine that has nothing but an apt-get, which ends with that status and notes what it was asked."""
    for name, does in {"id": "echo 0", "apt-get": f'echo "$@" >> {folder}/asked; exit {apt}'}.items():
        (folder / name).write_text(f"#!{shutil.which('sh')}\n{does}\n")
        (folder / name).chmod(0o755)
    command = [shutil.which("bash") or "bash", str(REPOSITORY / "deploy" / "system-packages")]
    return subprocess.run(command, env={"PATH": str(folder)} | environment, capture_output=True, text=True)


def test_what_is_missing_is_installed(tmp_path: Path) -> None:
    done = ran(tmp_path, apt=0)
    assert (done.returncode, done.stderr) == (0, "")
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked[0].startswith("update") and asked[1].split()[-2:] == ["redis-server", "prometheus"]


@pytest.mark.parametrize(("require", "status"), [("", 0), ("all", 1)])
def test_without_a_network_the_tests_go_on_but_not_in_ci(require: str, status: int, tmp_path: Path) -> None:
    done = ran(tmp_path, apt=100, KVRELAY_REQUIRE=require)
    assert done.returncode == status
    assert done.stderr == "could not install redis-server prometheus; tests that need them will be left out\n"
