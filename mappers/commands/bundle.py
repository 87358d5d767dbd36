"""Look at mapper bundles.

    kvrelay bundle show BUNDLE                     what it says about itself
    kvrelay bundle verify BUNDLE                   whether its files match their digests, and whether it passes its gate
    kvrelay bundle diff BUNDLE BUNDLE              what differs between two
    kvrelay bundle compose A_TO_B B_TO_C --out C   one map in place of two, with nothing fitted
    kvrelay bundle speed BUNDLE... [--json FILE]   how fast each maps here, beside what the processor can do

A bundle is a folder or the name of an embedded family.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mappers.bundle import MANIFEST, check_replaceable, load, load_manifest, save, verify
from mappers.commands.common import check_writable, run, write
from mappers.compose import compose
from mappers.difference import difference
from mappers.families import find_family
from mappers.speed import measure
from mappers.tables import speed_table


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    return run("bundle", lambda: print(options.work(options)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvrelay bundle", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    actions = parser.add_subparsers(required=True, metavar="show | verify | diff | compose | speed")
    for name, work, bundles in (
        ("show", _show, ["bundle"]),
        ("verify", _verify, ["bundle"]),
        ("diff", _diff, ["first", "second"]),
        ("compose", _compose, ["first", "second"]),
        ("speed", _speed, []),
    ):
        action = actions.add_parser(name)
        action.set_defaults(work=work)
        for bundle in bundles:
            action.add_argument(bundle)
        if name == "compose":
            action.add_argument("--out", required=True, metavar="FOLDER", help="where the bundle goes")
        if name == "speed":
            action.add_argument("bundles", nargs="+", metavar="bundle")
            action.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    return parser


def _folder(name: str) -> str | Path:
    return name if (Path(name) / MANIFEST).exists() else find_family(name).bundle


def _show(options: argparse.Namespace) -> str:
    manifest = load_manifest(_folder(options.bundle))
    shown: dict[str, Any] = {"bundle_id": manifest.bundle_id, "copied_layers": manifest.copied_layers}
    shown |= manifest.model_dump(mode="json", exclude={"source": {"config"}, "target": {"config"}})
    return json.dumps(shown, indent=2)


def _verify(options: argparse.Namespace) -> str:
    mapper = verify(_folder(options.bundle))
    return f"bundle {mapper.bundle_id} is whole; " + (mapper.refusal() or "it passes its gate")


def _diff(options: argparse.Namespace) -> str:
    rows = difference(load(_folder(options.first)), load(_folder(options.second)))
    if not rows:
        return "no difference"
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    return "\n".join(f"{name:<{widths[0]}}  {ours:<{widths[1]}}  {theirs}" for name, ours, theirs in rows)


def _compose(options: argparse.Namespace) -> str:
    check_replaceable(Path(options.out))
    mapper = save(compose(load(_folder(options.first)), load(_folder(options.second))), options.out)
    source, target = mapper.manifest.source.name, mapper.manifest.target.name
    return f"bundle {mapper.bundle_id} from {source} to {target}, without an evaluation; written to {options.out}"


def _speed(options: argparse.Namespace) -> str:
    check_writable(options.json)
    mappers = {name: load(_folder(name)) for name in options.bundles}
    speeds = {name: measure(mapper) for name, mapper in mappers.items()}
    if options.json:
        told = [
            {"bundle": mapper.bundle_id, "method": mapper.manifest.method, **speeds[name].told}
            for name, mapper in mappers.items()
        ]
        write(options.json, json.dumps(told[0] if len(told) == 1 else {"bundles": told}, indent=2) + "\n")
    return speed_table([(name, mappers[name].manifest.method, speed) for name, speed in speeds.items()])
