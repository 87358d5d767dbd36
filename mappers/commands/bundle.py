"""Inspect and combine mapper bundles.

    kvrelay bundle show BUNDLE                     print its manifest
    kvrelay bundle verify BUNDLE                   check its digests and its quality gate
    kvrelay bundle diff BUNDLE BUNDLE              list the differences between two
    kvrelay bundle compose A_TO_B B_TO_C --out C   combine two maps into one, without a fit
    kvrelay bundle speed BUNDLE... [--json FILE]   time each map on this machine, next to the processor's peak

A bundle is a folder or the name of an embedded family.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from mappers.bundle import MANIFEST, check_replaceable, load, load_manifest, save, verify
from mappers.commands.common import check_writable, run, write
from mappers.compose import compose
from mappers.families import find_family
from mappers.manifest import KINDS, Kind, OutputSpec
from mappers.mapper import Mapper
from mappers.report import speed_table
from mappers.speed import measure
from mappers.weights import WholeOutput

Difference = tuple[str, str, str]  # what, in the first bundle, in the second


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
            action.add_argument("--out", required=True, metavar="FOLDER", help="folder of the new bundle")
        if name == "speed":
            action.add_argument("bundles", nargs="+", metavar="bundle")
            action.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    return parser


def _folder(name: str) -> str | Path:
    return name if (Path(name) / MANIFEST).exists() else find_family(name).bundle


def _show(options: argparse.Namespace) -> str:
    manifest = load_manifest(_folder(options.bundle))
    values: dict[str, Any] = {"bundle_id": manifest.bundle_id, "copied_layers": manifest.copied_layers}
    values |= manifest.model_dump(mode="json", exclude={"source": {"config"}, "target": {"config"}})
    return json.dumps(values, indent=2)


def _verify(options: argparse.Namespace) -> str:
    mapper = verify(_folder(options.bundle))
    return f"bundle {mapper.bundle_id} is intact; " + (mapper.refusal() or "it passes its gate")


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
        rows = [
            {"bundle": mapper.bundle_id, "method": mapper.manifest.method, **speeds[name].as_json()}
            for name, mapper in mappers.items()
        ]
        write(options.json, json.dumps(rows[0] if len(rows) == 1 else {"bundles": rows}, indent=2) + "\n")
    return speed_table([(name, mappers[name].manifest.method, speed) for name, speed in speeds.items()])


# Differences between two bundles.


def _diff(options: argparse.Namespace) -> str:
    rows = differences(load(_folder(options.first)), load(_folder(options.second)))
    if not rows:
        return "no difference"
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    return "\n".join(f"{name:<{widths[0]}}  {first:<{widths[1]}}  {second}" for name, first, second in rows)


def differences(first: Mapper, second: Mapper) -> list[Difference]:
    """List what differs between two bundles, by layer if both map between the same geometries."""
    one, other = _describe(first), _describe(second)
    rows = [(name, one[name], other[name]) for name in one if one[name] != other[name]]
    geometries = [(each.manifest.source.geometry, each.manifest.target.geometry) for each in (first, second)]
    if geometries[0] == geometries[1]:
        for layer in range(first.manifest.target.num_layers):
            rows += [row for kind in KINDS if (row := _output_difference(first, second, layer, kind))]
    return rows


def _describe(mapper: Mapper) -> dict[str, str]:
    manifest, calibration = mapper.manifest, mapper.manifest.calibration
    hybrid = manifest.evaluation.arm("hybrid") if manifest.evaluation else None
    return {
        "bundle": manifest.bundle_id,
        "source": f"{manifest.source.name} {manifest.source.fingerprint[:12]}",
        "target": f"{manifest.target.name} {manifest.target.fingerprint[:12]}",
        "method": manifest.method,
        "options": ", ".join(f"{name} {value}" for name, value in sorted(manifest.options.items())) or "none",
        "precision": manifest.precision,
        "calibration": f"{calibration.name}, {calibration.num_tokens} tokens, {calibration.digest[:12]}",
        "bytes": str(mapper.weight_bytes),
        "evaluation": f"hybrid ppl ratio {hybrid.ppl_ratio:.3f} ({hybrid.ppl_low:.3f}-{hybrid.ppl_high:.3f}), "
        f"top-1 {hybrid.top1:.3f}"
        if hybrid
        else "none",
    }


def _output_difference(first: Mapper, second: Mapper, layer: int, kind: Kind) -> Difference | None:
    specs = [mapper.manifest.layers[layer].of(kind) for mapper in (first, second)]
    wholes = [WholeOutput.of(mapper, layer, kind).multiplied for mapper in (first, second)]
    blocks = sorted({block for whole in wholes for block in whole.blocks})
    one, other = (torch.cat([whole.rows(block) for block in blocks]) for whole in wholes)
    relative = float((one - other).norm() / other.norm().clamp_min(1e-30))
    if specs[0] == specs[1] and relative == 0 and torch.equal(wholes[0].bias, wholes[1].bias):
        return None
    descriptions = [describe_output(spec) for spec in specs]
    return f"layer {layer} {kind}", descriptions[0], f"{descriptions[1]}; weights differ by {relative:.1%}"


def describe_output(spec: OutputSpec) -> str:
    """Describe one output in a few words."""
    layers = [f"k{i}" for i in spec.key_layers] + [f"v{i}" for i in spec.value_layers]
    form = f" rank {spec.rank}" if spec.rank else " by heads" if spec.heads else ""
    return f"{spec.method}{form} of {','.join(layers)}" + (f" (R² {spec.r2:.3f})" if spec.r2 is not None else "")
