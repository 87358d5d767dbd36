"""The benchmark of the gateway's HTTP edge: its medians, and one tiny run."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from benchmarks.edge import Row, main, summary


def test_the_cost_of_the_router_is_taken_within_rounds() -> None:
    rows = [Row("router", False, 0, 0.5), Row("shortcut", False, 0, 0.4)]
    rows += [Row("shortcut", False, 1, 0.8), Row("router", False, 1, 1.0), Row("router", False, 2, 2.5)]
    rows += [Row("shortcut", False, 2, 2.0)]
    rows += [Row(arm, True, 0, 1.0) for arm in ("shortcut", "router")]
    whole, stream = summary(rows)
    assert (whole["shortcut"], whole["router"], round(whole["router_costs_us"])) == (0.8, 1.0, 200)
    assert stream["router_costs_us"] == 0


def test_a_run_measures_both_arms(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "edge.json"
    assert main(["--requests", "3", "--rounds", "2", "--json", str(path)]) == 0
    report = orjson.loads(path.read_bytes())
    assert {(row["arm"], row["stream"]) for row in report["rows"]} == {
        (arm, stream) for arm in ("shortcut", "router") for stream in (False, True)
    }
    assert "router costs" in capsys.readouterr().out
