"""`kvrelay soak`: run a whole stack under mixed load, while its processes are killed and frozen at random.

Every answer is checked against plain transformers, or against the offline replay of its handoff. None may contain
another document's canary, and none may be late. Memory, descriptors, threads and tasks of each process are watched, and
what they leave behind. Redis faults need `redis-server`.

Exit status 1 when something was wrong (the last lines name it), 2 when the stack did not start, 130 when it was
stopped; the report then covers the run so far.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from pathlib import Path

from tools import family, measuring
from tools.output import INTERRUPTED, add_json_option, write_results
from tools.soak.run import SoakOptions, soak

MAX_SEED = 10**6


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="kvrelay soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=_minutes, required=True)
    parser.add_argument("--family", default=family.DEFAULT_FAMILY)
    parser.add_argument("--seed", type=int, default=random.randrange(MAX_SEED), help="of load and faults")
    add_json_option(parser, "the report")
    parsed = parser.parse_args(argv)
    options = SoakOptions(parsed.family, parsed.minutes, parsed.seed)
    return measuring.run("kvrelay soak", lambda: _soak(options, parsed.json))


def _soak(options: SoakOptions, file: Path | None) -> int:
    print(f"seed {options.seed}", flush=True)
    report = soak(options, lambda line: print(f"  {line}", flush=True))
    write_results(report.table(), file, report.as_json())
    if report.was_stopped:
        print("stopped", file=sys.stderr)
        return INTERRUPTED
    return 1 if report.verdict else 0


def _minutes(text: str) -> float:
    try:
        minutes = float(text)
    except ValueError:
        minutes = 0.0
    if not 0 < minutes < 10_000:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a number above 0 and below 10,000")
    return minutes
