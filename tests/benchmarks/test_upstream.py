"""The benchmark of upstream clients: its medians, and one tiny run."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.upstream import Row, main, summary


def test_medians_are_relative_to_the_socket_client() -> None:
    rows = [Row("socket", False, number, cpu_ms, 1.0) for number, cpu_ms in enumerate((0.1, 0.2, 9.0))]
    rows += [Row("httpx", False, number, 0.6, 2.0) for number in range(3)]
    socket, httpx = summary(rows)
    assert (socket["cpu_ms"], socket["cpu_ratio"]) == (0.2, 1.0)
    assert (httpx["client"], httpx["wall_ms"], round(httpx["cpu_ratio"], 6)) == ("httpx", 2.0, 3.0)


def test_tiny_run_measures_every_client(tmp_path: Path) -> None:
    path = tmp_path / "upstream.json"
    assert main(["--calls", "3", "--rounds", "1", "--concurrency", "2", "--words", "4", "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert {(row["client"], row["stream"]) for row in report["rows"]} >= {
        (client, stream) for client in ("socket", "httpx") for stream in (False, True)
    }
    assert all(row["cpu_ms"] > 0 and row["cpu_ratio"] > 0 for row in report["summary"])
