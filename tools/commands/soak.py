"""`kvrelay soak`: a whole stack under mixed load, while its parts are killed and frozen at random.

Every answer is checked against plain transformers, or against the offline replay of the handoff that it came from; none
may hold another document's canary, and none may come late. Memory, descriptors, threads and tasks of each process are
watched, and what they leave behind. Needs `redis-server` to put faults upon a registry too.

Exit status 1 when something was wrong (the last lines name it), 2 when the stack did not come up, 130 when it was
stopped; then the report goes as far as the run did.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from pathlib import Path

from tools import family, measuring
from tools.output import add_json_option, write_results
from tools.soak.run import Asked, soak
from tools.soak.settings import scale_of

MAX_SEED = 10**6


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="kvrelay soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=_minutes, required=True)
    parser.add_argument("--family", default=family.DEFAULT_FAMILY)
    parser.add_argument("--seed", type=int, default=random.randrange(MAX_SEED), help="of load and faults")
    add_json_option(parser, "the report")
    options = parser.parse_args(argv)
    asked = Asked(options.family, options.minutes, options.seed, scale_of(options.family))
    return measuring.run("kvrelay soak", lambda: _soak(asked, options.json))


def _soak(asked: Asked, file: Path | None) -> int:
    print(f"seed {asked.seed}", flush=True)
    report = soak(asked, lambda line: print(f"  {line}", flush=True))
    write_results(report.table(), file, report.as_json())
    if report.was_stopped:
        print("stopped", file=sys.stderr)
        return 130
    return 1 if report.wrong else 0


def _minutes(text: str) -> float:
    try:
        minutes = float(text)
    except ValueError:
        minutes = 0.0
    if not 0 < minutes < 10_000:
        raise argparse.ArgumentTypeError(f"{text}: minutes are a number above 0 and below 10,000")
    return minutes
