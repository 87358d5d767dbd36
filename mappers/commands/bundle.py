"""Look at a mapper bundle.

    kvrelay bundle show PATH     what it says about itself
    kvrelay bundle verify PATH   whether its files match their digests, and whether it passes its gate
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mappers.bundle import MANIFEST, load, load_manifest
from mappers.errors import MapperError
from mappers.families import find_family


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="kvrelay bundle", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=("show", "verify"))
    parser.add_argument("path", help="a bundle's folder, or an embedded family")
    options = parser.parse_args(argv)
    try:
        path = options.path if (Path(options.path) / MANIFEST).exists() else find_family(options.path).bundle
        print(_show(path) if options.action == "show" else _verify(path))
    except MapperError as error:
        print(f"kvrelay bundle: {error}", file=sys.stderr)
        return 1
    return 0


def _show(path: str | Path) -> str:
    manifest = load_manifest(path)
    shown: dict[str, Any] = {"bundle_id": manifest.bundle_id, "copied_layers": manifest.copied_layers}
    shown |= manifest.model_dump(mode="json", exclude={"source": {"config"}, "target": {"config"}})
    return json.dumps(shown, indent=2)


def _verify(path: str | Path) -> str:
    mapper = load(path)
    return f"bundle {mapper.bundle_id} is whole; " + (mapper.refusal() or "it passes its gate")
