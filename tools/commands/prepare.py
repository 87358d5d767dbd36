"""`kvrelay prepare FAMILY`: make the model folders of an embedded family."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from mappers.errors import MapperError
from mappers.families import find_family


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="kvrelay prepare", description=__doc__)
    parser.add_argument("family", nargs="?", default="smol")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the folders to FILE")
    options = parser.parse_args(argv)
    try:
        family = find_family(options.family)
        family.prepare(lambda line: print(line, flush=True))
    except MapperError as error:
        print(f"kvrelay prepare: {error}", file=sys.stderr)
        return 1
    folders = {"small": str(family.source), "large": str(family.target), "bundle": str(family.bundle)}
    if options.json:
        options.json.write_text(json.dumps(folders))
    else:
        print("\n".join(f"{name} {folder}" for name, folder in folders.items()))
    return 0
