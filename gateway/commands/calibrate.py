"""`kvrelay calibrate LOG`: the threshold of a cascade, from a log of answers whose worth is known.

Ask for what you want: `--max-escalations 0.2`, or `--min-agreement 0.95`. Half of the log finds the threshold, the
other half tells what it is worth. LOG holds JSON lines {"confidence": -0.4, "agrees": true}; docs/operate.md tells how
one is made.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

from gateway.commands.files import add_json_option, write_json
from gateway.commands.table import render
from gateway.logs.calibration import (
    Isotonic,
    Judged,
    Outcome,
    halves,
    read_answers,
    threshold_for_agreement,
    threshold_for_escalations,
)
from gateway.logs.lines import LogUnusable
from gateway.logs.plot import steps

DEFAULT_COST = 0.2


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0, or 2 for a log that cannot be used."""
    asked = _arguments().parse_args(argv)
    try:
        answers = read_answers(asked.log)
    except LogUnusable as error:
        print(f"kvrelay calibrate: {error}", file=sys.stderr)
        return 2
    fit, held_out = halves(answers)
    threshold = _threshold(asked, fit)
    told = _told(threshold, fit, held_out, asked.small_cost)
    write_json(asked.json, told)
    if asked.plot:
        asked.plot.write_text(steps(Isotonic.fit(fit), threshold))
    print(_report(told))
    return 0


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvrelay calibrate", description=__doc__)
    parser.add_argument("log", type=Path, metavar="LOG")
    goal = parser.add_mutually_exclusive_group(required=True)
    goal.add_argument("--max-escalations", type=_share, metavar="SHARE", help="escalate at most so many, 0 to 1")
    goal.add_argument("--min-agreement", type=_share, metavar="SHARE", help="be as good as the large model so often")
    parser.add_argument("--small-cost", type=_share, default=DEFAULT_COST, help="of the large model's (default: 0.2)")
    add_json_option(parser, "the result")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw agreement over confidence, as SVG")
    return parser


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no share; needed is a number from 0 to 1")
    return share


def _threshold(asked: argparse.Namespace, fit: Sequence[Judged]) -> float:
    if asked.max_escalations is not None:
        return threshold_for_escalations(fit, asked.max_escalations)
    return threshold_for_agreement(fit, asked.min_agreement)


def _told(threshold: float, fit: Sequence[Judged], held_out: Sequence[Judged], small_cost: float) -> dict[str, Any]:
    told: dict[str, Any] = {"threshold": threshold, "small_cost": small_cost}
    for name, answers in (("fit", fit), ("held_out", held_out)):
        outcome = Outcome.of(answers, threshold)
        cost = outcome.relative_cost(small_cost)
        told[name] = {"answers": len(answers)} | vars(outcome) | {"relative_cost": cost}
    return told


def _report(told: dict[str, Any]) -> str:
    head = ["", "answers", "escalations", "agreement", "of accepted", "cost (large alone: 1)"]
    rows = [[name, *told[name].values()] for name in ("fit", "held_out")]
    threshold = f"{Decimal(repr(told['threshold'])):f}"  # whole: rounded, it would accept or escalate others
    return f"{render(head, rows)}\n\npolicy: {{name: confidence, threshold: {threshold}}}"
