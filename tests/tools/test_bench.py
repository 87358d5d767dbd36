"""The bench's times of a handoff, from the metrics that a worker exports."""

from __future__ import annotations

from typing import Any

import pytest

from tools.commands.bench import (
    HandoffTimes,
    TransferTotals,
    handoff_summary,
    handoff_table,
    handoff_times,
    transfer_totals,
)
from workers.api.schemas import TRANSFER_PHASES
from workers.metrics import WorkerMetrics

KVRELAY: dict[str, Any] = {"handoff_ttft_ms": 500.0, "prefill_ms": 120.0, "bytes": 3 * 2**20}


def after_handoff(metrics: WorkerMetrics, map_s: float) -> TransferTotals:
    for phase in TRANSFER_PHASES:
        metrics.transfer_phase_seconds.labels(phase).observe(map_s if phase == "map" else 0.01)
    metrics.transfer_seconds.observe(map_s + 0.1)
    metrics.transfer_scratch.set(2**20)
    return transfer_totals(metrics.expose().decode())


def measured(metrics: WorkerMetrics, map_s: float, **changes: Any) -> HandoffTimes:
    before = transfer_totals(metrics.expose().decode())
    found = handoff_times(before, after_handoff(metrics, map_s), 512, False, KVRELAY | changes)
    assert found is not None
    return found


def test_times_are_differences_of_totals() -> None:
    metrics = WorkerMetrics()
    measured(metrics, 5.0)
    found = measured(metrics, 0.3)
    assert found.phases_ms == pytest.approx(dict.fromkeys(TRANSFER_PHASES, 10.0) | {"map": 300.0})
    assert (found.transfer_ms, found.tail_ms) == (pytest.approx(400.0), 120.0)
    assert (found.source_bytes, found.scratch_bytes) == (3 * 2**20, 2**20)


def test_turn_needs_exactly_one_handoff() -> None:
    metrics = WorkerMetrics()
    before = transfer_totals(metrics.expose().decode())
    assert handoff_times(before, before, 512, False, KVRELAY) is None
    after = after_handoff(metrics, 0.3)
    assert handoff_times(before, after, 512, False, {"handoff_ttft_ms": None}) is None
    assert handoff_times(before, after_handoff(metrics, 0.3), 512, False, KVRELAY) is None  # two handoffs


def test_summary_has_medians_and_the_share_outside_of_the_map() -> None:
    metrics = WorkerMetrics()
    (row,) = handoff_summary([measured(metrics, map_s) for map_s in (0.1, 0.3, 9.0)])
    assert (row["length"], row["warm"]) == (512, False)
    assert row["phases_ms"]["map"] == pytest.approx(300.0)
    assert row["not_map"] == pytest.approx(0.25)
    assert row["rest_ms"] == pytest.approx(500 - 400 - 120)
    assert "25%" in handoff_table([row]) and "goal: not map <= 15%" in handoff_table([row])
    assert handoff_table([]) == "no turn was handed over"
