"""The wait added by an escalation: decided early, or at the end of the small model's answer.

    python benchmarks/early.py --family smol --json early.json

    end      small   |─ prefill ─|────── whole answer ─────────────|
             large                                                 |── transfer ──|─ first token
    early    small   |─ prefill ─|─ t1 .. t4 .. t16 |✕
             large                        |── transfer ──|─ first token
                                                                   ◄─ added wait ─►    measured from here in both arms

Both arms ask the same questions about the same documents, in turn. Each is a tenant of its own, so that neither finds
the other's caches. The added wait is the time from the decision of arm `end` to the large model's first token; it is
negative if that token comes earlier. Questions that only one arm escalated are excluded, and counted. Results are
medians over the repeats.
"""

from __future__ import annotations

import argparse
import hashlib
import secrets
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import httpx

from tools import family, measuring
from tools.client import Documents, TimedAnswer, chat
from tools.output import add_json_option, render, write_json

ARMS = ("end", "early")
QUESTION = "Tell in full what is said about the third entry, and what you make of it."
ANSWER_TOKENS = 64
NUM_JUDGED, SPECULATE_AFTER = 16, 4


@dataclass(frozen=True)
class Row:
    """One answer. Times are in milliseconds; `length` is the document's number of tokens."""

    arm: str
    length: int
    repeat: int
    tier: str
    path: str
    early_handoff: bool
    ttft_ms: float
    handoff_ttft_ms: float | None


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", default=family.DEFAULT_FAMILY)
    parser.add_argument("--lengths", type=measuring.lengths, default=[512, 1024])
    parser.add_argument("--repeats", type=measuring.count, default=5)
    parser.add_argument("--threshold", type=float, default=-0.02, help="escalate below this mean log-probability")
    add_json_option(parser, "all rows and the medians")
    options = parser.parse_args(argv)
    return measuring.run("early", lambda: _early(options))


def _early(options: argparse.Namespace) -> int:
    rows = _run(options.family, options.lengths, options.repeats, options.threshold)
    found = summary(rows)
    write_json(options.json, measuring.report(rows, found))
    print(_table(found))
    return 0


def _run(name: str, lengths: Sequence[int], repeats: int, threshold: float) -> list[Row]:
    folders = family.prepare(name)
    keys = {arm: secrets.token_urlsafe(32) for arm in ARMS}
    config = family.configuration(name, folders) | two_arms(keys, threshold)
    with measuring.own_stack("early", config) as (stack, secret), ExitStack() as opened:
        documents = Documents(stack.workers["large-0"].url, secret)
        clients = {arm: opened.enter_context(_client(stack.url, key)) for arm, key in keys.items()}
        return list(_measure(clients, documents, lengths, repeats))


def two_arms(keys: dict[str, str], threshold: float) -> dict[str, Any]:
    """Return the configuration of both arms: each is a tenant with its own API key and policy."""
    policies = {
        "end": {"name": "confidence", "threshold": threshold, "streaming": "buffer", "speculate_after": None},
        "early": {
            "name": "confidence",
            "threshold": threshold,
            "num_tokens": NUM_JUDGED,
            "speculate_after": SPECULATE_AFTER,
        },
    }
    tenants = {arm: {"api_keys": [hashlib.sha256(key.encode()).hexdigest()], "tier": arm} for arm, key in keys.items()}
    rules = [{"name": arm, "when": {"tenant_tier": [arm]}, "then": policies[arm]} for arm in ARMS]
    return {"tenants": {"default": {}} | tenants, "policy": {"name": "rules", "rules": rules}}


def _client(url: str, key: str) -> httpx.Client:
    return httpx.Client(base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=300, trust_env=False)


def _measure(
    clients: dict[str, httpx.Client], documents: Documents, lengths: Sequence[int], repeats: int
) -> Iterator[Row]:
    for arm in ARMS:  # warm up: first allocations, and rates that are not measured yet
        _ask(clients[arm], documents.of_length(min(lengths), "warm-up"))
    for repeat in range(repeats):
        for length in lengths:
            document = documents.of_length(length, f"{length} {repeat}")
            for arm in ARMS if repeat % 2 else reversed(ARMS):
                yield _row(arm, length, repeat, _ask(clients[arm], document))
            print(f"  {length} tokens, repeat {repeat + 1}/{repeats}", flush=True)


def _ask(http: httpx.Client, document: str) -> TimedAnswer:
    messages = [{"role": "system", "content": document}, {"role": "user", "content": QUESTION}]
    return chat(http, messages, max_tokens=ANSWER_TOKENS)


def _row(arm: str, length: int, repeat: int, answer: TimedAnswer) -> Row:
    report = answer.kvrelay
    tier, path, early = str(report["tier"]), str(report["path"]), bool(report["early_handoff"])
    return Row(arm, length, repeat, tier, path, early, answer.ttft_ms, report.get("handoff_ttft_ms"))


def summary(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the medians in milliseconds, by length, over the questions that both arms escalated; None without any."""
    by_question: dict[tuple[int, int], dict[str, Row]] = {}
    for row in rows:
        by_question.setdefault((row.length, row.repeat), {})[row.arm] = row
    return [
        _of_length(length, [arms for (at, _), arms in by_question.items() if at == length])
        for length in sorted({row.length for row in rows})
    ]


def _of_length(length: int, questions: Sequence[dict[str, Row]]) -> dict[str, Any]:
    pairs = [arms for arms in questions if all(arms[arm].handoff_ttft_ms is not None for arm in ARMS)]
    decided_ms = [arms["end"].ttft_ms - (arms["end"].handoff_ttft_ms or 0.0) for arms in pairs]
    ttft_ms = {arm: [arms[arm].ttft_ms for arms in pairs] for arm in ARMS}
    added_ms = {arm: [at - decided for at, decided in zip(ttft_ms[arm], decided_ms, strict=True)] for arm in ARMS}
    return {
        "length": length,
        "questions": len(questions),
        "escalated_by_both": len(pairs),
        "decided_at_the_end_ms": _median(decided_ms),
        "ttft_ms": {arm: _median(ttft_ms[arm]) for arm in ARMS},
        "added_wait_ms": {arm: _median(added_ms[arm]) for arm in ARMS},
    }


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _table(found: Sequence[dict[str, Any]]) -> str:
    head = ["tokens", "escalated", "decided at the end ms", "arm", "TTFT ms", "added wait ms"]
    rows = [
        [one["length"], f"{one['escalated_by_both']}/{one['questions']}", one["decided_at_the_end_ms"], arm]
        + [one["ttft_ms"][arm], one["added_wait_ms"][arm]]
        for one in found
        for arm in ARMS
    ]
    return "\n" + render(head, rows)


if __name__ == "__main__":
    sys.exit(main())
