"""`kvrelay calibrate LOG`: find a policy's threshold from a log of answers with known quality.

Set a goal: `--max-escalations 0.2`, or `--min-agreement 0.95`. One half of the log gives the threshold, the other half
evaluates it. LOG holds JSON lines {"confidence": -0.4, "agrees": true}, gzipped or not, or is - for standard input;
docs/operate.md describes how to make one.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from gateway.policies import POLICIES, build
from tools.logs import LogUnusable
from tools.logs.calibration import Goal, Isotonic, LabelledAnswer, ThresholdEffect, halves, plot, read_answers
from tools.output import add_json_option, check_distinct, new_file, render, run_command, write_results, write_text

DEFAULT_COST = 0.2
ALWAYS = {"name": "always_escalate"}
WITH_THRESHOLD = [name for name, policy in POLICIES.items() if "threshold" in policy.model_fields]


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0, or 2 for an unusable log."""
    parser = argparse.ArgumentParser(prog="kvrelay calibrate", description=__doc__)
    parser.add_argument("log", type=Path, metavar="LOG")
    goal = parser.add_mutually_exclusive_group(required=True)
    goal.add_argument("--max-escalations", type=_share, metavar="SHARE", help="maximum share of escalations, 0 to 1")
    goal.add_argument("--min-agreement", type=_share, metavar="SHARE", help="minimum agreement with the large model")
    parser.add_argument(
        "--policy",
        type=_policy,
        default="{name: confidence}",
        metavar="YAML",
        help="policy that scored the answers, as in kvrelay.yaml (default: %(default)s)",
    )
    parser.add_argument(
        "--small-cost",
        type=_share,
        default=DEFAULT_COST,
        metavar="SHARE",
        help="cost of the small model, as a share of the large one's (default: %(default)s)",
    )
    add_json_option(parser, "the result")
    parser.add_argument("--plot", type=new_file, metavar="FILE", help="draw agreement over confidence, as SVG")
    options = parser.parse_args(argv)
    check_distinct(parser, options.log, options.json, options.plot)
    return run_command("kvrelay calibrate", lambda: _calibrate(options), LogUnusable)


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a number from 0 to 1")
    return share


def _policy(text: str) -> dict[str, Any]:
    try:
        policy = yaml.safe_load(text)
        if not isinstance(policy, dict) or policy.get("name") not in WITH_THRESHOLD:
            raise ValueError(f"has no threshold; expected {{name: ...}} of {' or '.join(WITH_THRESHOLD)}")
        build(policy)
    except (yaml.YAMLError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from error
    return policy


def _calibrate(options: argparse.Namespace) -> int:
    answers = read_answers(options.log)
    _check_scores(options, answers)
    fit, held_out = halves(answers)
    is_limit = options.max_escalations is not None
    goal = Goal("escalations", options.max_escalations) if is_limit else Goal("agreement", options.min_agreement)
    threshold = goal.threshold(fit)
    found = threshold if math.isfinite(threshold) else None  # None: no confidence in the log reaches the goal
    result: dict[str, Any] = {
        "threshold": found,
        "policy": ALWAYS if found is None else options.policy | {"threshold": found},
        "small_cost": options.small_cost,
        "goal": vars(goal) | {"met": goal.is_met(ThresholdEffect.of(held_out, threshold))},
    }
    for name, half in (("fit", fit), ("held_out", held_out)):
        effect = ThresholdEffect.of(half, threshold)
        cost = effect.relative_cost(options.small_cost)
        result[name] = {"answers": len(half)} | vars(effect) | {"relative_cost": cost}
    write_results(_report(result), options.json, result)
    if options.plot:
        write_text(options.plot, plot(Isotonic.fit(fit), threshold))
    return 0


def _check_scores(options: argparse.Namespace, answers: Sequence[LabelledAnswer]) -> None:
    """Check that the policy accepts the log's scores as thresholds. Raises `LogUnusable`."""
    for score in (extreme(answer.confidence for answer in answers) for extreme in (min, max)):
        try:
            build(options.policy | {"threshold": score})
        except ValueError as error:
            problem = f"{options.log} was scored by another policy than {_yaml(options.policy)}"
            raise LogUnusable(f"{problem} ({error}); name it with --policy") from error


def _report(result: dict[str, Any]) -> str:
    head = ["", "answers", "escalations", "agreement", "of accepted", "cost (large alone: 1)"]
    rows = [[name, *result[name].values()] for name in ("fit", "held_out")]
    return "\n\n".join([render(head, rows), *_warnings(result), f"policy: {_yaml(result['policy'])}"])


def _warnings(result: dict[str, Any]) -> Iterator[str]:
    goal, held_out = result["goal"], result["held_out"]
    if result["threshold"] is None:
        yield (
            "No threshold gives that agreement: not even the most confident answers are good enough. Escalate all, or, "
            "for less cost, send all to the large model (policy fixed)."
        )
    if not goal["met"]:
        share, count = held_out[goal["of"]], held_out["answers"]
        uncertainty = 2 * math.sqrt(share * (1 - share) / count)
        yield (
            f"On the held-out half, the share of {goal['of']} is {share:.3f} +- {uncertainty:.3f} ({count} answers), "
            f"not the {goal['share']:g} asked for."
        )


def _yaml(policy: dict[str, Any]) -> str:
    """Format on one line, with exact numbers: a rounded threshold would accept or escalate other answers."""
    return str(yaml.safe_dump(policy, default_flow_style=True, sort_keys=False, width=math.inf)).strip()
