"""deploy/system-packages, the first step of `make test`."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from deploy.composed import REPOSITORY


def ran(folder: Path, *, apt: int, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run it as root with nothing but an apt-get that records its arguments and exits with `apt`."""
    for name, does in {"id": "echo 0", "apt-get": f'echo "$@" >> {folder}/calls; exit {apt}'}.items():
        (folder / name).write_text(f"#!{shutil.which('sh')}\n{does}\n")
        (folder / name).chmod(0o755)
    command = [shutil.which("bash") or "bash", str(REPOSITORY / "deploy" / "system-packages")]
    return subprocess.run(command, env={"PATH": str(folder)} | environment, capture_output=True, text=True)


def test_missing_packages_are_installed(tmp_path: Path) -> None:
    done = ran(tmp_path, apt=0)
    assert (done.returncode, done.stderr) == (0, "")
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls[0].startswith("update") and calls[1].split()[-2:] == ["redis-server", "prometheus"]


@pytest.mark.parametrize(("require", "status"), [("", 0), ("all", 1)])
def test_failed_install_is_an_error_in_ci_only(require: str, status: int, tmp_path: Path) -> None:
    done = ran(tmp_path, apt=100, KVRELAY_REQUIRE=require)
    assert done.returncode == status
    assert done.stderr == "could not install redis-server prometheus; tests that need them will be skipped\n"
