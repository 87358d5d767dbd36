"""`kvrelay bench`: time to first token of an escalated turn, with and without the handoff.

Arms, interleaved, each on its own documents so that none finds the cache of another:
  A  the large model prefills the whole prompt: the faster of our engine and plain transformers; on vLLM, vLLM alone
  B  the small model first, then the large one; each reuses only its own cache
  C  the small model first, then the large one over the handed-over cache
  D  the large model alone from the start, with its own cache
Each arm runs cold (a new document) and warm (the next question about it). Results are medians over the repeats.

The target worker's metrics, read before and after each turn, split a handoff into its phases:

    transfer    |lease|check|open|head|  copy, map, write, chunk by chunk  | waits |
    then        prefill of the tail over the mapped cache, and the way to the first token
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tools import family, measuring
from tools.client import Documents, TimedAnswer, chat
from tools.output import add_json_option, render, write_results
from tools.stack import StackError
from workers.api.schemas import TRANSFER_PHASES

ARMS = ("A", "B", "C", "D")
QUESTIONS = ("What is said about the third entry? Answer in one sentence.", "And about the one after it?")
ANSWER_TOKENS = 8
PLAIN = "plain_transformers"
TRANSFER = "kvrelay_kv_transfer_duration_seconds"
PHASE = "kvrelay_kv_transfer_phase_seconds"
NOT_MAP_GOAL = 0.15


@dataclass(frozen=True)
class BenchRow:
    """One measured turn. `length` is the document's, in tokens."""

    arm: str
    length: int
    repeat: int
    warm: bool
    ttft_ms: float
    path: str
    handoff_ttft_ms: float | None = None
    prefill_ms: float | None = None
    map_ms: float | None = None
    copy_ms: float | None = None
    bytes: int | None = None


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="kvrelay bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--family", default=family.DEFAULT_FAMILY)
    family.add_engine_option(parser)
    parser.add_argument("--lengths", type=measuring.lengths, default=[512, 1024, 2048, 4096], metavar="N,N,...")
    parser.add_argument("--repeats", type=measuring.count, default=3)
    add_json_option(parser, "all rows and the medians")
    options = parser.parse_args(argv)
    return measuring.run("kvrelay bench", lambda: _bench(options))


def _bench(options: argparse.Namespace) -> int:
    folders = family.prepare(options.family)
    config = family.configuration(options.family, folders, engine=options.engine)
    with measuring.own_stack("bench", config) as (stack, secret):
        target = stack.workers["large-0"].url
        documents = Documents(target, secret)
        http = httpx.Client(base_url=stack.url, timeout=300, trust_env=False)
        # Beside another engine than ours there is no plain arm: a handoff there saves that engine's own prefill.
        plain = PlainTransformers(folders["large"]) if options.engine == family.DEFAULT_ENGINE else nullcontext()
        with http, plain as transformers:
            for arm in ARMS:  # warm up: no arm pays for first allocations or unmeasured rates
                list(_turns(http, arm, documents.of_length(512, f"warm-up {arm}")))
            measured = list(_measure(http, transformers, documents, options, target))
        peak, pool = (
            {worker: _memory(child.pid, field) for worker, child in stack.workers.items()}
            for field in ("VmHWM", "RssShmem")
        )
    rows = [row for row, _ in measured]
    report = measuring.report(rows, _summary(rows)) | {
        "handoffs": handoff_summary([handoff for _, handoff in measured if handoff]),
        "map": family.map_speed(options.family),
        "peak_memory_bytes": peak,
        "pool_memory_bytes": pool,
    }
    write_results(_table(report), options.json, report)
    return 0


def _measure(
    http: httpx.Client,
    plain: PlainTransformers | None,
    documents: Documents,
    options: argparse.Namespace,
    target: str,
) -> Iterator[tuple[BenchRow, HandoffTimes | None]]:
    for repeat in range(options.repeats):
        for length in options.lengths:
            for shift in range(len(ARMS)):
                arm = ARMS[(shift + repeat) % len(ARMS)]
                document = documents.of_length(length, f"{arm} {length} {repeat}")
                before = _scrape(target)
                for warm, answer in enumerate(_turns(http, arm, document)):
                    after = _scrape(target)
                    handoff = handoff_times(before, after, length, bool(warm), answer.kvrelay)
                    yield _row(arm, length, repeat, bool(warm), answer), handoff
                    before = after
            if plain is not None:
                ids = documents.token_ids(documents.of_length(length, f"{PLAIN} {length} {repeat}"), QUESTIONS[0])
                yield BenchRow("A", length, repeat, False, plain.prefill_ms(ids), PLAIN), None
            print(f"  {length} tokens, repeat {repeat + 1}/{options.repeats}", flush=True)


def _turns(http: httpx.Client, arm: str, document: str) -> Iterator[TimedAnswer]:
    messages = [{"role": "system", "content": document}]
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        answer = _ask(http, arm, messages)
        messages.append({"role": "assistant", "content": answer.text})
        yield answer


def _ask(http: httpx.Client, arm: str, messages: list[dict[str, str]]) -> TimedAnswer:
    if arm == "A":
        return chat(http, messages, model="large", max_tokens=ANSWER_TOKENS, options={"no_cache": True})
    if arm == "C":
        return chat(http, messages, max_tokens=ANSWER_TOKENS, options={"policy": "always_escalate"})
    if arm == "D":
        return chat(http, messages, model="large", max_tokens=ANSWER_TOKENS)
    small = chat(http, messages, model="small", max_tokens=1)
    large = chat(http, messages, model="large", max_tokens=ANSWER_TOKENS)
    kvrelay = large.kvrelay | {"handoff_ttft_ms": large.ttft_ms}
    return replace(large, ttft_ms=small.ttft_ms + large.ttft_ms, kvrelay=kvrelay)


def _row(arm: str, length: int, repeat: int, warm: bool, answer: TimedAnswer) -> BenchRow:
    keys = ("handoff_ttft_ms", "prefill_ms", "map_ms", "copy_ms", "bytes")
    measured = {key: answer.kvrelay.get(key) for key in keys}
    return BenchRow(arm, length, repeat, warm, answer.ttft_ms, str(answer.kvrelay.get("path")), **measured)


def _summary(rows: Sequence[BenchRow]) -> list[dict[str, Any]]:
    """Return medians. For arm A cold, those of our engine or of plain transformers, whichever is faster."""
    summary = []
    for arm, length, warm in sorted({(row.arm, row.length, row.warm) for row in rows}):
        chosen = [row for row in rows if (row.arm, row.length, row.warm) == (arm, length, warm)]
        engines = {row.path == PLAIN for row in chosen}
        ttft = min(statistics.median(r.ttft_ms for r in chosen if (r.path == PLAIN) == plain) for plain in engines)
        handoffs = [row.handoff_ttft_ms for row in chosen if row.handoff_ttft_ms is not None]
        handoff = statistics.median(handoffs) if handoffs else None
        summary.append({"arm": arm, "length": length, "warm": warm, "ttft_ms": ttft, "handoff_ttft_ms": handoff})
    return summary


def _table(report: dict[str, Any]) -> str:
    baseline = {(s["length"], s["warm"]): s["ttft_ms"] for s in report["summary"] if s["arm"] == "A"}
    rows = []
    for one in sorted(report["summary"], key=lambda s: (s["length"], s["warm"], s["arm"])):
        length, warm, handoff_ms = one["length"], one["warm"], one["handoff_ttft_ms"]
        share = f"1/{baseline[length, warm] / handoff_ms:.1f}" if handoff_ms else "-"
        rows.append([length, "warm" if warm else "cold", one["arm"], one["ttft_ms"], handoff_ms, share])
    speed = report["map"]
    by_length = ", ".join(f"{row['ms'] * 1024 / row['tokens']:.0f} at {row['tokens']}" for row in speed["map"])
    memory = ", ".join(
        f"{worker} {size / 2**20:.0f} MiB ({report['pool_memory_bytes'][worker] / 2**20:.0f} of them pools)"
        for worker, size in report["peak_memory_bytes"].items()
    )
    parts = [
        render(["tokens", "cache", "arm", "TTFT ms", "handoff TTFT ms", "handoff / A"], rows),
        handoff_table(report["handoffs"]),
        f"map alone: {speed['share_of_peak']:.0%} of the {speed['peak_gflops']:.0f} GFLOPS of one large float32 matrix "
        f"product with {speed['threads']} threads (goal: >= 60%); median ms per 1,024 tokens: {by_length}",
        f"peak memory: {memory}",
    ]
    return "\n" + "\n\n".join(parts)


# Phases of a handoff


@dataclass(frozen=True)
class TransferTotals:
    """Totals since the target worker started. `scratch_bytes` is what the last handoff used beside the pools."""

    num_handoffs: int
    transfer_ms: float
    phases_ms: dict[str, float]
    scratch_bytes: int


@dataclass(frozen=True)
class HandoffTimes:
    """One handoff. `tail_ms` is the prefill after the transfer."""

    length: int
    warm: bool
    transfer_ms: float
    phases_ms: dict[str, float]
    tail_ms: float
    handoff_ttft_ms: float
    source_bytes: int
    scratch_bytes: int


def _scrape(worker_url: str) -> TransferTotals:
    return transfer_totals(httpx.get(f"{worker_url}/metrics", timeout=10, trust_env=False).raise_for_status().text)


def transfer_totals(metrics: str) -> TransferTotals:
    """Parse a worker's metrics in Prometheus text format."""
    samples = [sample for family in text_string_to_metric_families(metrics) for sample in family.samples]
    plain = {sample.name: sample.value for sample in samples if not sample.labels}
    phases = {sample.labels["phase"]: 1e3 * sample.value for sample in samples if sample.name == f"{PHASE}_sum"}
    return TransferTotals(
        int(plain[f"{TRANSFER}_count"]),
        1e3 * plain[f"{TRANSFER}_sum"],
        {phase: phases.get(phase, 0.0) for phase in TRANSFER_PHASES},
        int(plain["kvrelay_kv_transfer_scratch_bytes"]),
    )


def handoff_times(
    before: TransferTotals, after: TransferTotals, length: int, warm: bool, kvrelay: dict[str, Any]
) -> HandoffTimes | None:
    """Return the times of a turn's handoff. `kvrelay` is that field of the reply. None unless there was exactly one."""
    if after.num_handoffs != before.num_handoffs + 1 or kvrelay.get("handoff_ttft_ms") is None:
        return None
    return HandoffTimes(
        length,
        warm,
        after.transfer_ms - before.transfer_ms,
        {phase: took_ms - before.phases_ms[phase] for phase, took_ms in after.phases_ms.items()},
        float(kvrelay.get("prefill_ms") or 0.0),
        float(kvrelay["handoff_ttft_ms"]),
        int(kvrelay.get("bytes") or 0),
        after.scratch_bytes,
    )


def handoff_summary(handoffs: Sequence[HandoffTimes]) -> list[dict[str, Any]]:
    """Return medians by length, for cold and warm turns. `not_map` is the share of the transfer outside of the map."""
    rows = []
    for length, warm in sorted({(one.length, one.warm) for one in handoffs}):
        chosen = [one for one in handoffs if (one.length, one.warm) == (length, warm)]
        phases = {phase: statistics.median(one.phases_ms[phase] for one in chosen) for phase in TRANSFER_PHASES}
        rows.append(
            {"length": length, "warm": warm, "phases_ms": phases}
            | {name: statistics.median(getattr(one, name) for one in chosen) for name in ("transfer_ms", "tail_ms")}
            | {name: max(getattr(one, name) for one in chosen) for name in ("source_bytes", "scratch_bytes")}
            | {"rest_ms": statistics.median(one.handoff_ttft_ms - one.transfer_ms - one.tail_ms for one in chosen)}
            | {"not_map": statistics.median(1 - one.phases_ms["map"] / one.transfer_ms for one in chosen)}
        )
    return rows


def handoff_table(rows: Sequence[dict[str, Any]]) -> str:
    """Format a `handoff_summary`, one line per length."""
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


# Processes


class PlainTransformers:
    """`workers.plain` as a child process: plain transformers, with as many threads as a worker has."""

    def __init__(self, model: str):
        threads = str(len(os.sched_getaffinity(0)))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "workers.plain", model, "--threads", threads],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def __enter__(self) -> PlainTransformers:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def prefill_ms(self, token_ids: list[int]) -> float:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(token_ids) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise StackError("plain transformers ended early; run `python -m workers.plain` by hand to see why")
        return float(json.loads(line)["prefill_ms"])


def _memory(pid: int, field: str) -> int:
    """Return a process's resident memory in bytes (Linux): its peak (VmHWM), or what it shares now (RssShmem): its own
    pool, fully mapped from the start, and what it has read of others'."""
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith(field))
