"""`kvrelay calibrate LOG`: the threshold of a cascade, from a log of answers whose worth is known.

Ask for what you want: `--max-escalations 0.2`, or `--min-agreement 0.95`. Half of the log finds the threshold, the
other half tells what it is worth. LOG holds JSON lines {"confidence": -0.4, "agrees": true}, packed by gzip or not, or
is - for standard input; docs/operate.md tells how one is made.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from gateway.policies import POLICIES, build
from tools.logs.calibration import Goal, Isotonic, Judged, Outcome, halves, read_answers
from tools.logs.lines import LogUnusable
from tools.logs.plot import steps
from tools.output import add_json_option, check_distinct, new_file, render, run_command, write_results, write_text

DEFAULT_COST = 0.2
ALWAYS = {"name": "always_escalate"}
JUDGES = [name for name, policy in POLICIES.items() if "threshold" in policy.model_fields]


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0, or 2 for a log that cannot be used."""
    parser = _arguments()
    asked = parser.parse_args(argv)
    check_distinct(parser, asked.log, asked.json, asked.plot)
    return run_command("kvrelay calibrate", lambda: _calibrate(asked), LogUnusable)


def _calibrate(asked: argparse.Namespace) -> int:
    answers = read_answers(asked.log)
    _check_scores(asked, answers)
    fit, held_out = halves(answers)
    goal = _goal(asked)
    threshold = goal.threshold(fit)
    told = _told(asked, goal, threshold, fit, held_out)
    write_results(_report(told), asked.json, told)
    if asked.plot:
        write_text(asked.plot, steps(Isotonic.fit(fit), threshold))
    return 0


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvrelay calibrate", description=__doc__)
    parser.add_argument("log", type=Path, metavar="LOG")
    goal = parser.add_mutually_exclusive_group(required=True)
    goal.add_argument("--max-escalations", type=_share, metavar="SHARE", help="escalate at most so many, 0 to 1")
    goal.add_argument("--min-agreement", type=_share, metavar="SHARE", help="be as good as the large model so often")
    parser.add_argument(
        "--policy",
        type=_policy,
        default="{name: confidence}",
        metavar="YAML",
        help="that scored the answers, as kvrelay.yaml has it (default: %(default)s)",
    )
    parser.add_argument(
        "--small-cost",
        type=_share,
        default=DEFAULT_COST,
        metavar="SHARE",
        help="of the large model's (default: %(default)s)",
    )
    add_json_option(parser, "the result")
    parser.add_argument("--plot", type=new_file, metavar="FILE", help="draw agreement over confidence, as SVG")
    return parser


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no share; needed is a number from 0 to 1")
    return share


def _policy(text: str) -> dict[str, Any]:
    try:
        policy = yaml.safe_load(text)
        if not isinstance(policy, dict) or policy.get("name") not in JUDGES:
            raise ValueError(f"has no threshold; needed is {{name: ...}} of {' or '.join(JUDGES)}")
        build(policy)
    except (yaml.YAMLError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from error
    return policy


def _check_scores(asked: argparse.Namespace, answers: Sequence[Judged]) -> None:
    """A threshold may be whatever a policy's score may be."""
    for score in (extreme(answer.confidence for answer in answers) for extreme in (min, max)):
        try:
            build(asked.policy | {"threshold": score})
        except ValueError as error:
            told = f"{asked.log} was scored by another policy than {_yaml(asked.policy)}"
            raise LogUnusable(f"{told} ({error}); name it with --policy") from error


def _goal(asked: argparse.Namespace) -> Goal:
    if asked.max_escalations is not None:
        return Goal("escalations", asked.max_escalations)
    return Goal("agreement", asked.min_agreement)


def _told(
    asked: argparse.Namespace, goal: Goal, threshold: float, fit: Sequence[Judged], held_out: Sequence[Judged]
) -> dict[str, Any]:
    """`threshold` is None where no confidence seen is one that reaches the goal."""
    found = threshold if math.isfinite(threshold) else None
    told: dict[str, Any] = {
        "threshold": found,
        "policy": ALWAYS if found is None else asked.policy | {"threshold": found},
        "small_cost": asked.small_cost,
        "goal": vars(goal) | {"met": goal.is_met(Outcome.of(held_out, threshold))},
    }
    for name, answers in (("fit", fit), ("held_out", held_out)):
        outcome = Outcome.of(answers, threshold)
        cost = outcome.relative_cost(asked.small_cost)
        told[name] = {"answers": len(answers)} | vars(outcome) | {"relative_cost": cost}
    return told


def _report(told: dict[str, Any]) -> str:
    head = ["", "answers", "escalations", "agreement", "of accepted", "cost (large alone: 1)"]
    rows = [[name, *told[name].values()] for name in ("fit", "held_out")]
    return "\n\n".join([render(head, rows), *_remarks(told), f"policy: {_yaml(told['policy'])}"])


def _remarks(told: dict[str, Any]) -> Iterator[str]:
    """On what was asked for and not reached."""
    goal, held_out = told["goal"], told["held_out"]
    if told["threshold"] is None:
        yield (
            "No threshold gives that agreement: not even the surest answers are good enough. All must escalate, or, "
            "for less, go to the large model at once (policy fixed)."
        )
    if not goal["met"]:
        share, count = held_out[goal["of"]], held_out["answers"]
        doubt = 2 * math.sqrt(share * (1 - share) / count)
        yield (
            f"On what was held out, the share of {goal['of']} is {share:.3f}, not the {goal['share']:g} asked for; "
            f"{count} answers tell it within {doubt:.3f}."
        )


def _yaml(policy: dict[str, Any]) -> str:
    """On one line, numbers whole: rounded, a threshold would accept or escalate others."""
    return str(yaml.safe_dump(policy, default_flow_style=True, sort_keys=False, width=math.inf)).strip()
