"""`kvrelay soak` on real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.e2e.running import START_S
from tests.e2e.test_up import ROOT


def test_short_soak(tmp_path: Path) -> None:
    report, scratch = tmp_path / "report.json", tmp_path / "scratch"
    scratch.mkdir()
    arguments = ["soak", "--minutes", "0.05", "--family", "tiny", "--seed", "1", "--json", str(report)]
    ended = subprocess.run(
        [sys.executable, "-m", "tools.cli", *arguments],
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(scratch)},
        capture_output=True,
        text=True,
        timeout=2 * START_S,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "nothing was wrong" in ended.stdout
    content: dict[str, Any] = json.loads(report.read_text())
    assert content["checked"] > 0 and content["requests"] >= content["checked"]
    assert (content["wrong_answers"], content["errors"], content["late_answers"], content["verdict"]) == (0, 0, 0, [])
    assert {sample["part"] for sample in content["samples"]} == {"gateway", "small-0", "small-1", "large-0"}
    assert not list(scratch.iterdir())
