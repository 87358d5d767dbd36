"""`kvrelay prefixes LOG`: before anything else, how much of your traffic shares prefixes, and what spoils the rest.

LOG holds JSON lines, each the body of a chat completion (or an object with one under "request" or "body"), oldest
first, packed by gzip or not; - is standard input. The report shows no text of them unless asked to by --show-text. With
--prefill-rate, or --config to ask your workers what they have measured, it estimates the time saved.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from gateway.settings import load, read_secret
from tools.commands.doctor import ask_workers
from tools.family import secret_file
from tools.logs.lines import LogUnusable
from tools.logs.traffic import BUCKETS, Prompt, Sharing, read_prompts, sharing, spoilers
from tools.output import add_json_option, check_distinct, render, run_command, write_results
from workers.api.errors import KvrelayError, WorkerUnavailable
from workers.api.schemas import WorkerInfo

SHOWN_CHARS = 60
ADVICE = "Move it behind what is shared: into the last user message, or into a message of its own just before it."


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0, or 2 for a log that cannot be used."""
    parser = _arguments()
    asked = parser.parse_args(argv)
    check_distinct(parser, asked.log, asked.json)
    return run_command("kvrelay prefixes", lambda: _prefixes(asked), LogUnusable)


def _prefixes(asked: argparse.Namespace) -> int:
    prompts = read_prompts(asked.log)
    rate = asked.prefill_rate if asked.config is None else measured(asked.config)
    told = _told(prompts, rate, asked)
    write_results(_report(told), asked.json, told)
    return 0


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvrelay prefixes", description=__doc__)
    parser.add_argument("log", type=Path, metavar="LOG")
    rate = parser.add_mutually_exclusive_group()
    rate.add_argument("--prefill-rate", type=_positive, metavar="N", help="tokens a second that your model reads")
    rate.add_argument("--config", type=Path, metavar="FILE", help="or ask the workers that this kvrelay.yaml names")
    parser.add_argument("--chars-per-token", type=_positive, default=4.0, metavar="N", help="default: 4")
    parser.add_argument("--show-text", action="store_true", help="show how the top prefixes begin")
    add_json_option(parser, "the report")
    return parser


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 1e-3 <= number <= 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 0.001 to 1e9")
    return number


def measured(config: Path) -> float:
    """Tokens a second that a worker of the first tier, which reads every prompt, has measured itself to read: the
    median. Raises `KvrelayError` where none has."""
    settings = load(config)
    first = settings.tiers[0].name
    told = asyncio.run(ask_workers(settings, read_secret(secret_file(settings))))
    infos = {name: told[name] for name, worker in settings.workers.items() if worker.tier == first}
    known = [info.rates.prefill_tokens_per_s for info in infos.values() if isinstance(info, WorkerInfo)]
    rates = [rate for rate in known if rate is not None]
    if not rates:
        why = "; ".join(f"{name}: {_why_unknown(info)}" for name, info in infos.items()) or "the file names none"
        raise WorkerUnavailable(f"no worker of tier {first!r} tells how fast it reads ({why})")
    return median(rates)


def _why_unknown(info: WorkerInfo | KvrelayError) -> str:
    return info.message if isinstance(info, KvrelayError) else "has read nothing yet"


def _told(prompts: Sequence[Prompt], rate: float | None, asked: argparse.Namespace) -> dict[str, Any]:
    found, spoiled = sharing(prompts), spoilers(prompts)
    cleaned = sharing(prompt.without(spoiled) for prompt in prompts) if spoiled else found
    return {
        "requests": found.num_prompts,
        "requests_with_a_hit": found.num_hits,
        "chars": found.chars,
        "hit_ratio": found.ratio,
        "hit_ratio_without_volatile": cleaned.ratio,
        "by_length": [_bucket(start, found) for start in BUCKETS if start in found.by_length],
        "top": [_top(one, asked.show_text) for one in found.top()],
        "volatile": [vars(spoiler) for spoiler in spoiled],
        "prefill_rate": rate,
        "saved_prefill_s": _saved_s(found, rate, asked.chars_per_token),
        "saved_prefill_s_without_volatile": _saved_s(cleaned, rate, asked.chars_per_token),
    }


def _bucket(start: int, found: Sharing) -> dict[str, Any]:
    chars, shared = found.by_length[start]
    return {"from_chars": start, "chars": chars, "hit_ratio": shared / chars if chars else 0.0}


def _top(one: tuple[str, int, int, int, str], show_text: bool) -> dict[str, Any]:
    name, uses, num_messages, chars, text = one
    told = {"name": name[:12], "uses": uses, "messages": num_messages, "chars": chars}
    return told | ({"begins": _shown(text)} if show_text else {})


def _shown(text: str) -> str:
    """On one line, and without what a terminal would obey."""
    return "".join(char if char.isprintable() else " " for char in text[:SHOWN_CHARS])


def _saved_s(found: Sharing, rate: float | None, chars_per_token: float) -> float | None:
    return None if rate is None else found.shared_chars / chars_per_token / rate


def _report(told: dict[str, Any]) -> str:
    ratio, cleaned = told["hit_ratio"], told["hit_ratio_without_volatile"]
    parts = [
        f"{told['requests_with_a_hit']} of {told['requests']} requests begin like an earlier one; "
        f"{ratio:.0%} of all characters need not be read again.",
        render(["prompts from chars", "chars", "hit ratio"], [list(one.values()) for one in told["by_length"]]),
    ]
    if told["top"]:
        parts.append(render(list(told["top"][0]), [list(one.values()) for one in told["top"]]))
    if told["volatile"]:
        rows = [list(one.values()) for one in told["volatile"]]
        parts += [
            f"What changes from request to request within what could be shared; without it: {cleaned:.0%}. {ADVICE}",
            render(["kind", "role", "message", "at char", "prompts"], rows),
        ]
    if told["saved_prefill_s"] is not None:
        saved, more = told["saved_prefill_s"], told["saved_prefill_s_without_volatile"]
        parts.append(f"Reading saved over the log, as estimated: {saved:.1f} s; without what changes: {more:.1f} s.")
    return "\n\n".join(parts)
