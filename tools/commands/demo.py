"""`kvrelay demo`: a short scripted conversation over a stack of its own, and what each turn cost.

Exit status 1 when a turn fell back to a full prefill, 2 when the stack did not come up.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from tools.commands import family, measuring
from tools.commands.client import chat
from tools.commands.conversation import HANDBOOK, TURNS, Turn
from tools.commands.files import add_json_option, tell
from tools.commands.table import render

AGREEMENT_TOKENS = 16
HANDED_OVER = ("mapped", "hybrid")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="kvrelay demo", description=__doc__)
    parser.add_argument("--family", default=family.DEFAULT_FAMILY)
    add_json_option(parser, "the table")
    options = parser.parse_args(argv)
    return measuring.run("kvrelay demo", lambda: _demo(options.family, options.json))


def _demo(name: str, file: Path | None) -> int:
    config = family.configuration(name, family.prepare(name))
    with measuring.own_stack("demo", config) as (stack, _):
        with httpx.Client(base_url=stack.url, timeout=120, trust_env=False) as http:
            turns = list(_converse(http))
    tell(_table(turns), file, {"turns": turns})
    return _verdict(turns)


def _converse(http: httpx.Client) -> list[dict[str, Any]]:
    messages, turns = [{"role": "system", "content": HANDBOOK}], []
    for number, turn in enumerate(TURNS, start=1):
        messages.append({"role": "user", "content": turn.question})
        answer = chat(http, messages, options=_options(turn))
        messages.append({"role": "assistant", "content": answer.text})
        turns.append(_row(number, answer.ttft_ms, answer.kvrelay))
        print(f"\n{number}. {turn.question}\n   {answer.text.strip()}", flush=True)
    return turns


def _options(turn: Turn) -> dict[str, Any]:
    return {"agreement_probe": AGREEMENT_TOKENS} | ({"policy": turn.policy} if turn.policy else {})


def _row(number: int, ttft_ms: float, told: dict[str, Any]) -> dict[str, Any]:
    return {
        "turn": number,
        "tier": told.get("tier"),
        "path": told.get("path"),
        "forced": told.get("forced"),
        "prefix_tokens": told.get("mapped_tokens") or told.get("cached_tokens") or 0,
        "ttft_ms": ttft_ms,
        "handoff_ttft_ms": told.get("handoff_ttft_ms"),
        "full_prefill_ttft_ms": told.get("full_prefill_ms"),
        "top1_agreement": told.get("top1_agreement"),
    }


def _table(turns: list[dict[str, Any]]) -> str:
    head = ["turn", "tier", "path", "decided", "handed over", "TTFT ms", "handoff ms", "full prefill ms", "agreement"]
    rows = [
        [t["turn"], t["tier"], t["path"], "forced" if t["forced"] else "confidence"]
        + [t[key] for key in list(t)[4:]]
        for t in turns
    ]
    return "\n" + render(head, rows)


def _verdict(turns: list[dict[str, Any]]) -> int:
    """0 if some turn was handed over, every one of those was seen to beat the full prefill, and nothing fell back."""
    fallen = [t["turn"] for t in turns if str(t["path"]).startswith("fallback")]
    if fallen:
        print(f"\nfell back to a full prefill: turn {', '.join(map(str, fallen))}", file=sys.stderr)
        return 1
    handed = [t for t in turns if t["path"] in HANDED_OVER]
    if not handed:
        print("\nno turn was handed over", file=sys.stderr)
        return 1
    unmeasured = [t["turn"] for t in handed if not (t["handoff_ttft_ms"] and t["full_prefill_ttft_ms"])]
    if unmeasured:
        print(f"\nnot measured against a full prefill: turn {', '.join(map(str, unmeasured))}", file=sys.stderr)
        return 1
    slower = [t["turn"] for t in handed if t["handoff_ttft_ms"] >= t["full_prefill_ttft_ms"]]
    if slower:
        print(f"\nthe handoff was no faster than a full prefill: turn {', '.join(map(str, slower))}", file=sys.stderr)
        return 1
    return 0
