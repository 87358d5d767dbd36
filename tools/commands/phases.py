"""Where the time of handoffs went, by the target worker's own metrics: looked at before a turn and after it.

    transfer    |lease|check|open|head|  copy, map, write, a chunk after the other  | waits |
    then        the tail, read over the mapped cache, and the way to the first token
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tools.commands.table import render
from workers.api.schemas import TRANSFER_PHASES

TRANSFER = "kvrelay_kv_transfer_duration_seconds"
PHASE = "kvrelay_kv_transfer_phase_seconds"
NOT_MAP_GOAL = 0.15


@dataclass(frozen=True)
class Look:
    """Sums since the worker started: handoffs, their milliseconds, and those of each phase. And what the last one took
    beside the pools' blocks."""

    num_handoffs: int
    transfer_ms: float
    phases_ms: dict[str, float]
    scratch_bytes: int


@dataclass(frozen=True)
class Split:
    """One handoff."""

    length: int
    warm: bool
    transfer_ms: float
    phases_ms: dict[str, float]
    tail_ms: float
    handoff_ttft_ms: float
    source_bytes: int
    scratch_bytes: int


def look(worker_url: str) -> Look:
    return look_at(httpx.get(f"{worker_url}/metrics", timeout=10, trust_env=False).raise_for_status().text)


def look_at(metrics: str) -> Look:
    """`metrics` in Prometheus's text format."""
    samples = [sample for family in text_string_to_metric_families(metrics) for sample in family.samples]
    plain = {sample.name: sample.value for sample in samples if not sample.labels}
    phases = {sample.labels["phase"]: 1e3 * sample.value for sample in samples if sample.name == f"{PHASE}_sum"}
    return Look(
        int(plain[f"{TRANSFER}_count"]),
        1e3 * plain[f"{TRANSFER}_sum"],
        {phase: phases.get(phase, 0.0) for phase in TRANSFER_PHASES},
        int(plain["kvrelay_kv_transfer_scratch_bytes"]),
    )


def between(before: Look, after: Look, length: int, warm: bool, told: dict[str, Any]) -> Split | None:
    """The one handoff of the turn that `told` is the `kvrelay` field of; None if there was none."""
    if after.num_handoffs != before.num_handoffs + 1 or told.get("handoff_ttft_ms") is None:
        return None
    return Split(
        length,
        warm,
        after.transfer_ms - before.transfer_ms,
        {phase: took_ms - before.phases_ms[phase] for phase, took_ms in after.phases_ms.items()},
        float(told.get("prefill_ms") or 0.0),
        float(told["handoff_ttft_ms"]),
        int(told.get("bytes") or 0),
        after.scratch_bytes,
    )


def summary(splits: Sequence[Split]) -> list[dict[str, Any]]:
    """Medians by length, cold and warm apart. `not_map` is the share of the transfer that is not mapping."""
    rows = []
    for length, warm in sorted({(split.length, split.warm) for split in splits}):
        chosen = [split for split in splits if (split.length, split.warm) == (length, warm)]
        phases = {phase: statistics.median(s.phases_ms[phase] for s in chosen) for phase in TRANSFER_PHASES}
        rows.append(
            {"length": length, "warm": warm, "phases_ms": phases}
            | {name: statistics.median(getattr(s, name) for s in chosen) for name in ("transfer_ms", "tail_ms")}
            | {name: max(getattr(s, name) for s in chosen) for name in ("source_bytes", "scratch_bytes")}
            | {"rest_ms": statistics.median(s.handoff_ttft_ms - s.transfer_ms - s.tail_ms for s in chosen)}
            | {"not_map": statistics.median(1 - s.phases_ms["map"] / s.transfer_ms for s in chosen)}
        )
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A line for each length, of a `summary`."""
    if not rows:
        return "no turn was handed over"
    head = ["tokens", "cache", *TRANSFER_PHASES, "transfer", "not map", "tail", "rest", "source MiB", "scratch MiB"]
    lines = [
        [row["length"], "warm" if row["warm"] else "cold", *row["phases_ms"].values(), row["transfer_ms"]]
        + [f"{row['not_map']:.0%}", row["tail_ms"], row["rest_ms"]]
        + [row["source_bytes"] / 2**20, row["scratch_bytes"] / 2**20]
        for row in rows
    ]
    return f"handoffs, ms (goal: not map <= {NOT_MAP_GOAL:.0%} of the transfer)\n" + render(head, lines)
