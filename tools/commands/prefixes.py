"""`kvrelay prefixes LOG`: measure how much of your traffic shares prefixes, and what breaks the sharing.

LOG holds JSON lines, each the body of a chat completion (or an object with one under "request" or "body"), oldest
first, gzipped or not; - is standard input. The report shows no text of them without --show-text. With --prefill-rate,
or --config to ask your workers for their measured rate, it estimates the time saved.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from gateway.settings import load
from tools.client import worker_infos
from tools.family import secret_file
from tools.logs import LogUnusable
from tools.logs.traffic import BUCKETS, LoggedPrompt, Sharing, breakers, read_prompts, sharing
from tools.output import add_json_option, check_distinct, render, run_command, write_results
from workers.api.config import read_secret
from workers.api.errors import KvrelayError, WorkerUnavailable

SHOWN_CHARS = 60
ADVICE = "Move it behind what is shared: into the last user message, or into a message of its own just before it."


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0, or 2 for an unusable log."""
    parser = argparse.ArgumentParser(prog="kvrelay prefixes", description=__doc__)
    parser.add_argument("log", type=Path, metavar="LOG")
    rate = parser.add_mutually_exclusive_group()
    rate.add_argument("--prefill-rate", type=_positive, metavar="N", help="your model's prefill rate in tokens/s")
    rate.add_argument("--config", type=Path, metavar="FILE", help="or ask the workers of this kvrelay.yaml")
    parser.add_argument("--chars-per-token", type=_positive, default=4.0, metavar="N", help="default: 4")
    parser.add_argument("--show-text", action="store_true", help="show the beginnings of the top prefixes")
    add_json_option(parser, "the report")
    options = parser.parse_args(argv)
    check_distinct(parser, options.log, options.json)
    return run_command("kvrelay prefixes", lambda: _prefixes(options), LogUnusable)


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 1e-3 <= number <= 1e9:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a number from 0.001 to 1e9")
    return number


def _prefixes(options: argparse.Namespace) -> int:
    prompts = read_prompts(options.log)
    rate = options.prefill_rate if options.config is None else _measured_rate(options.config)
    result = _analyse(prompts, rate, options)
    write_results(_report(result), options.json, result)
    return 0


def _measured_rate(config: Path) -> float:
    """Return the median prefill rate, in tokens/s, of the first tier's workers, which prefill every prompt. Raises
    `KvrelayError` if none has measured it."""
    settings = load(config)
    tier = settings.tiers[0].name
    infos = asyncio.run(worker_infos(settings, read_secret(secret_file(settings))))
    rates, reasons = [], []
    for name, worker in settings.workers.items():
        if worker.tier != tier:
            continue
        info = infos[name]
        if isinstance(info, KvrelayError):
            reasons.append(f"{name}: {info.message}")
        elif info.rates.prefill_tokens_per_s is None:
            reasons.append(f"{name}: no prefill yet")
        else:
            rates.append(info.rates.prefill_tokens_per_s)
    if not rates:
        why = "; ".join(reasons) or "the file names none"
        raise WorkerUnavailable(f"no worker of tier {tier!r} has measured its prefill rate ({why})")
    return median(rates)


def _analyse(prompts: Sequence[LoggedPrompt], rate: float | None, options: argparse.Namespace) -> dict[str, Any]:
    found, broken_by = sharing(prompts), breakers(prompts)
    cleaned = sharing(prompt.without(broken_by) for prompt in prompts) if broken_by else found

    def saved_s(shared: Sharing) -> float | None:
        return None if rate is None else shared.shared_chars / options.chars_per_token / rate

    return {
        "requests": found.num_prompts,
        "requests_with_a_hit": found.num_hits,
        "chars": found.chars,
        "hit_ratio": found.ratio,
        "hit_ratio_without_volatile": cleaned.ratio,
        "by_length": [_bucket(start, found) for start in BUCKETS if start in found.by_length],
        "top": [_top(one, options.show_text) for one in found.top()],
        "volatile": [vars(breaker) for breaker in broken_by],
        "prefill_rate": rate,
        "saved_prefill_s": saved_s(found),
        "saved_prefill_s_without_volatile": saved_s(cleaned),
    }


def _bucket(start: int, found: Sharing) -> dict[str, Any]:
    chars, shared = found.by_length[start]
    return {"from_chars": start, "chars": chars, "hit_ratio": shared / chars if chars else 0.0}


def _top(prefix: tuple[str, int, int, int, str], show_text: bool) -> dict[str, Any]:
    name, uses, num_messages, chars, text = prefix
    row = {"name": name[:12], "uses": uses, "messages": num_messages, "chars": chars}
    if show_text:  # on one line, without control characters
        row["begins"] = "".join(char if char.isprintable() else " " for char in text[:SHOWN_CHARS])
    return row


def _report(result: dict[str, Any]) -> str:
    ratio, cleaned = result["hit_ratio"], result["hit_ratio_without_volatile"]
    parts = [
        f"{result['requests_with_a_hit']} of {result['requests']} requests begin like an earlier one; "
        f"{ratio:.0%} of all characters need no second prefill.",
        render(["prompts from chars", "chars", "hit ratio"], [list(one.values()) for one in result["by_length"]]),
    ]
    if result["top"]:
        parts.append(render(list(result["top"][0]), [list(one.values()) for one in result["top"]]))
    if result["volatile"]:
        rows = [list(one.values()) for one in result["volatile"]]
        parts += [
            f"These spans change from request to request in text that could be shared; without them: {cleaned:.0%}. "
            f"{ADVICE}",
            render(["kind", "role", "message", "at char", "prompts"], rows),
        ]
    if result["saved_prefill_s"] is not None:
        saved, more = result["saved_prefill_s"], result["saved_prefill_s_without_volatile"]
        parts.append(f"Estimated prefill saved over the log: {saved:.1f} s; without what changes: {more:.1f} s.")
    return "\n\n".join(parts)
