"""`kvrelay prepare FAMILY`: make the model folders of an embedded family."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points

from workers.families import Family
from workers.families.sources import SourceError


def find(name: str) -> Family:
    """The family registered under `name`. Raises `ValueError` naming those that are."""
    known = {point.name: point for point in entry_points(group="kvrelay.families")}
    if name not in known:
        raise ValueError(f"unknown family '{name}'; known: {', '.join(sorted(known))}")
    family: Family = known[name].load()()
    return family


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="kvrelay prepare", description=__doc__)
    parser.add_argument("family", nargs="?", default="smol")
    options = parser.parse_args(argv)
    try:
        family = find(options.family)
        family.prepare(lambda line: print(line, flush=True))
    except (ValueError, SourceError) as error:
        print(f"kvrelay prepare: {error}", file=sys.stderr)
        return 1
    print(f"small {family.source}\nlarge {family.target}\nbundle {family.bundle}")
    return 0
