"""`kvrelay prepare FAMILY`: make the model folders of an embedded family."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path

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
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the folders to FILE")
    options = parser.parse_args(argv)
    try:
        family = find(options.family)
        family.prepare(lambda line: print(line, flush=True))
    except (ValueError, SourceError) as error:
        print(f"kvrelay prepare: {error}", file=sys.stderr)
        return 1
    folders = {"small": str(family.source), "large": str(family.target), "bundle": str(family.bundle)}
    if options.json:
        options.json.write_text(json.dumps(folders))
    else:
        print("\n".join(f"{name} {folder}" for name, folder in folders.items()))
    return 0
