"""The GPU benchmark's dry run: all its steps on the CPU, including the other process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import gpu


@pytest.mark.slow
def test_dry_run_takes_every_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "gpu.json"
    assert gpu.main(["--dry-run", "--layers", "2", "--repeats", "1", "--json", str(report)]) == 0
    rows = json.loads(report.read_text())["rows"]
    assert [(row["pair"], row["tokens"]) for row in rows] == [("small -> large", 64), ("small -> large", 128)]
    assert all(row["copy_is_right"] and row["map_ms"] > 0 and row["prefill_ms"] > 0 for row in rows)
    assert "times faster" in capsys.readouterr().out
    assert not list(Path("/dev/shm").glob("kvrelay-*-gpu-benchmark-*"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_missing_gpu_suggests_the_dry_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main([]) == 2
    assert "--dry-run" in capsys.readouterr().err
