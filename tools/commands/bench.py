"""`kvrelay bench`: what an escalated turn waits for, with and without the handoff.

Arms, interleaved, each on documents of its own so that none finds another's cache:
  A  the large model reads the whole prompt: the faster of our engine and plain transformers; on vLLM, that alone
  B  the small model first, then the large one; each reuses its own cache only
  C  the small model first, then the large one over the handed-over cache
  D  the large model alone, from arrival, with its own cache
Each is taken cold (a new document) and warm (the next question about it). Medians over the repeats.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from tools.commands import family, measuring, phases
from tools.commands.client import Answer, chat
from tools.commands.documents import Documents
from tools.commands.files import add_json_option, tell
from tools.commands.stack import StackError
from tools.commands.table import render

ARMS = ("A", "B", "C", "D")
QUESTIONS = ("What is said about the third entry? Answer in one sentence.", "And about the one after it?")
ANSWER_TOKENS = 8
PLAIN = "plain_transformers"


@dataclass(frozen=True)
class Row:
    """One measured turn; times in milliseconds, `length` the tokens of the document."""

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
    parser.add_argument("--repeats", type=measuring.repeats, default=3)
    add_json_option(parser, "all rows and the medians")
    options = parser.parse_args(argv)
    return measuring.run("kvrelay bench", lambda: _bench(options))


def _bench(options: argparse.Namespace) -> int:
    report = _run(options.family, options.engine, options.lengths, options.repeats)
    tell(_table(report), options.json, report)
    return 0


def _run(name: str, engine: str, lengths: Sequence[int], repeats: int) -> dict[str, Any]:
    folders = family.prepare(name)
    with measuring.own_stack("bench", family.configuration(name, folders, engine=engine)) as (stack, secret):
        target = stack.workers["large-0"].url
        documents = Documents(target, secret)
        http = httpx.Client(base_url=stack.url, timeout=300, trust_env=False)
        with http, _plain(folders["large"], engine) as plain:
            _warm_up(http, documents)
            measured = list(_measure(http, plain, documents, lengths, repeats, target))
        peak, pool = (
            {worker: _memory(child.pid, what) for worker, child in stack.workers.items()}
            for what in ("VmHWM", "RssShmem")
        )
    rows = [row for row, _ in measured]
    return measuring.report(rows, _summary(rows)) | {
        "handoffs": phases.summary([split for _, split in measured if split]),
        "map": family.map_speed(name),
        "peak_memory_bytes": peak,
        "pool_memory_bytes": pool,
    }


def _plain(model: str, engine: str) -> AbstractContextManager[Plain | None]:
    """None beside another engine than ours: its own prefill is what a handoff there saves."""
    return Plain(model) if engine == family.DEFAULT_ENGINE else nullcontext()


def _warm_up(http: httpx.Client, documents: Documents) -> None:
    """Every path once, so that no arm pays for first-time allocations or for rates that nobody knows yet."""
    for arm in ARMS:
        list(_turns(http, arm, documents.of_length(512, f"warm-up {arm}")))


def _measure(
    http: httpx.Client, plain: Plain | None, documents: Documents, lengths: Sequence[int], repeats: int, target: str
) -> Iterator[tuple[Row, phases.Split | None]]:
    for repeat in range(repeats):
        for length in lengths:
            for shift in range(len(ARMS)):
                arm = ARMS[(shift + repeat) % len(ARMS)]
                document = documents.of_length(length, f"{arm} {length} {repeat}")
                before = phases.look(target)
                for warm, answer in enumerate(_turns(http, arm, document)):
                    after = phases.look(target)
                    split = phases.between(before, after, length, bool(warm), answer.kvrelay)
                    yield _row(arm, length, repeat, bool(warm), answer), split
                    before = after
            if plain is not None:
                ids = documents.token_ids(documents.of_length(length, f"{PLAIN} {length} {repeat}"), QUESTIONS[0])
                yield Row("A", length, repeat, False, plain.prefill_ms(ids), PLAIN), None
            print(f"  {length} tokens, repeat {repeat + 1}/{repeats}", flush=True)


def _turns(http: httpx.Client, arm: str, document: str) -> Iterator[Answer]:
    messages = [{"role": "system", "content": document}]
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        answer = _ask(http, arm, messages)
        messages.append({"role": "assistant", "content": answer.text})
        yield answer


def _ask(http: httpx.Client, arm: str, messages: list[dict[str, str]]) -> Answer:
    if arm == "A":
        return chat(http, messages, model="large", max_tokens=ANSWER_TOKENS, options={"no_cache": True})
    if arm == "C":
        return chat(http, messages, max_tokens=ANSWER_TOKENS, options={"policy": "always_escalate"})
    if arm == "D":
        return chat(http, messages, model="large", max_tokens=ANSWER_TOKENS)
    small = chat(http, messages, model="small", max_tokens=1)
    large = chat(http, messages, model="large", max_tokens=ANSWER_TOKENS)
    told = large.kvrelay | {"handoff_ttft_ms": large.ttft_ms}
    return replace(large, ttft_ms=small.ttft_ms + large.ttft_ms, kvrelay=told)


def _row(arm: str, length: int, repeat: int, warm: bool, answer: Answer) -> Row:
    told = answer.kvrelay
    measured = {key: told.get(key) for key in ("handoff_ttft_ms", "prefill_ms", "map_ms", "copy_ms", "bytes")}
    return Row(arm, length, repeat, warm, answer.ttft_ms, str(told.get("path")), **measured)


def _summary(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Medians. For arm A cold, of our engine or of plain transformers, whichever is faster."""
    summary = []
    for arm, length, warm in sorted({(row.arm, row.length, row.warm) for row in rows}):
        chosen = [row for row in rows if (row.arm, row.length, row.warm) == (arm, length, warm)]
        readers = {row.path == PLAIN for row in chosen}
        ttft = min(statistics.median(r.ttft_ms for r in chosen if (r.path == PLAIN) == reader) for reader in readers)
        handoffs = [row.handoff_ttft_ms for row in chosen if row.handoff_ttft_ms is not None]
        handoff = statistics.median(handoffs) if handoffs else None
        summary.append({"arm": arm, "length": length, "warm": warm, "ttft_ms": ttft, "handoff_ttft_ms": handoff})
    return summary


def _table(report: dict[str, Any]) -> str:
    baseline = {(s["length"], s["warm"]): s["ttft_ms"] for s in report["summary"] if s["arm"] == "A"}
    rows = [
        [s["length"], "warm" if s["warm"] else "cold", s["arm"], s["ttft_ms"], s["handoff_ttft_ms"]]
        + [_share(s["handoff_ttft_ms"], baseline[s["length"], s["warm"]])]
        for s in sorted(report["summary"], key=lambda s: (s["length"], s["warm"], s["arm"]))
    ]
    memory = ", ".join(
        f"{worker} {size / 2**20:.0f} MiB ({report['pool_memory_bytes'][worker] / 2**20:.0f} of them pools)"
        for worker, size in report["peak_memory_bytes"].items()
    )
    head = ["tokens", "cache", "arm", "TTFT ms", "handoff TTFT ms", "handoff / A"]
    parts = [render(head, rows), phases.table(report["handoffs"]), _map_line(report["map"])]
    return "\n" + "\n\n".join([*parts, f"peak memory: {memory}"])


def _map_line(speed: dict[str, Any]) -> str:
    by_length = ", ".join(f"{row['ms'] * 1024 / row['tokens']:.0f} at {row['tokens']}" for row in speed["map"])
    return (
        f"the map alone: {speed['share_of_peak']:.0%} of the {speed['peak_gflops']:.0f} GFLOPS that one large float32 "
        f"product reaches with {speed['threads']} threads (goal: >= 60%); ms per 1,024 tokens, medians: {by_length}"
    )


def _share(handoff_ms: float | None, baseline_ms: float) -> str:
    return f"1/{baseline_ms / handoff_ms:.1f}" if handoff_ms else "-"


class Plain:
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

    def __enter__(self) -> Plain:
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


def _memory(pid: int, what: str) -> int:
    """Resident memory of a process in bytes (Linux): the most that it had (VmHWM), or what it shares now (RssShmem):
    its pool, which is mapped whole from the start, and what it has read of others'."""
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith(what))
