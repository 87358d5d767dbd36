"""Judge a bundle on the fixed quality protocol, beside its controls; or several side by side.

    kvrelay eval smol
    kvrelay eval smol --diagnose
    kvrelay eval bundles/mine --source SMALL --target LARGE --data talks.jsonl --write --html report.html
    kvrelay eval bundles/ridge bundles/lowrank --family smol
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mappers import report
from mappers.arms import ARMS, ESSENTIAL, check_arms
from mappers.bundle import MANIFEST, load, update
from mappers.commands.output import check_writable, write
from mappers.commands.pair import Meter, Pair, add_pair_options, check_device, pair_of_family, pair_of_options, say
from mappers.diagnose import Row, diagnose
from mappers.errors import MapperError
from mappers.evaluate import evaluate_all
from mappers.families import find_family
from mappers.fingerprint import fingerprint, tokenizer_digest
from mappers.manifest import Evaluation
from mappers.mapper import Mapper
from mappers.models import load_model, local_folder
from mappers.protocol import Protocol
from mappers.speed import measure
from mappers.tables import comparison, diagnosis_table, evaluation_table

GREEDY = 128
DIAGNOSED = 4  # documents, unless told otherwise


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    try:
        _check(options)
        pair, folders = _resolve(options)
        mappers = [load(folder, options.device) for folder in folders]
        models = _models(pair, mappers, options.device)
        rows = _diagnosed(mappers[0], models, pair, options) if options.diagnose else []
        if not options.diagnose or options.html:
            _evaluate(mappers, folders, models, pair, options, rows)
        elif options.json:
            told = {"bundle": mappers[0].bundle_id, "data": f"{pair.corpus}, split tune", "rows": report.told(rows)}
            write(options.json, json.dumps(told, indent=1) + "\n")
    except MapperError as error:
        print(f"kvrelay eval: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    fixed = Protocol()
    parser = argparse.ArgumentParser(
        prog="kvrelay eval", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundles", nargs="+", metavar="BUNDLE", help="a bundle's folder, or an embedded family")
    parser.add_argument("--family", help="whose models and text to use, for bundles given as folders")
    add_pair_options(parser)
    parser.add_argument(
        "--documents", type=int, help=f"at each length (default {fixed.num_documents}; to diagnose, {DIAGNOSED})"
    )
    parser.add_argument("--controls", type=int, default=fixed.num_controls, help="of these, for controls (%(default)s)")
    parser.add_argument("--lengths", type=_numbers, default=fixed.lengths, help="prefix lengths (384,1024,2048)")
    parser.add_argument("--head", type=int, default=fixed.head, help="first tokens read natively (default %(default)s)")
    parser.add_argument("--tail", type=int, default=fixed.tail, help="last tokens read natively (default %(default)s)")
    parser.add_argument("--scored", type=int, default=fixed.scored, help="tokens scored behind (default %(default)s)")
    parser.add_argument(
        "--greedy", type=int, nargs="?", const=GREEDY, default=0, metavar="TOKENS", help="also generate freely; slow"
    )
    parser.add_argument(
        "--arms", type=lambda text: tuple(text.split(",")), help=f"of {', '.join(ARMS)}; of several bundles fewer"
    )
    parser.add_argument("--table", action="store_true", help="a line a bundle, with its size and the map's time")
    parser.add_argument("--diagnose", action="store_true", help="where the error lies, on the tune split")
    parser.add_argument("--write", action="store_true", help="store the result in the bundle, where its gate reads it")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a report to look at to FILE")
    return parser


def _numbers(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r}; allowed: numbers of tokens, as in 384,1024")
    return tuple(map(int, parts))


def _check(options: argparse.Namespace) -> None:
    _protocol(options, DIAGNOSED)  # which refuses settings that make no sense
    check_device(options.device)
    check_arms(options.arms or ())
    if options.diagnose and len(options.bundles) > 1:
        raise MapperError(f"--diagnose looks at one bundle, not at {len(options.bundles)}")
    if options.diagnose and (options.write or options.table) and not options.html:
        raise MapperError("--diagnose judges nothing that --write or --table could use; allowed: with --html, both")
    check_writable(options.json, options.html)


def _resolve(options: argparse.Namespace) -> tuple[Pair, list[str]]:
    """The pair that is judged on, and the bundles' folders."""
    found = [(name, (Path(name) / MANIFEST).exists()) for name in options.bundles]
    families = {name: find_family(name) for name, is_folder in found if not is_folder}
    if options.family:
        families = {options.family: find_family(options.family), **families}
    folders = [name if is_folder else str(families[name].bundle) for name, is_folder in found]
    if len(families) > 1:
        raise MapperError(f"families {', '.join(families)}: allowed is one, whose models all bundles are judged on")
    for family in families.values():
        return pair_of_family(family, options), folders
    return pair_of_options(options), folders


def _models(pair: Pair, mappers: Sequence[Mapper], device: str) -> tuple[Any, Any]:
    folders = local_folder(pair.source), local_folder(pair.target)
    for mapper in mappers:
        mapper.check(fingerprint(folders[0]), fingerprint(folders[1]))
        mapper.check_tokenizers(tokenizer_digest(folders[0]), tokenizer_digest(folders[1]))
    return load_model(folders[0], device), load_model(folders[1], device)


def _protocol(options: argparse.Namespace, documents: int) -> Protocol:
    return Protocol(
        lengths=options.lengths,
        num_documents=documents if options.documents is None else options.documents,
        head=options.head,
        tail=options.tail,
        scored=options.scored,
        num_controls=options.controls,
        greedy=options.greedy,
    )


def _evaluate(
    mappers: list[Mapper],
    folders: list[str],
    models: tuple[Any, Any],
    pair: Pair,
    options: argparse.Namespace,
    rows: list[Row],
) -> None:
    evaluations = evaluate_all(
        mappers,
        *models,
        pair.documents("test"),
        _protocol(options, Protocol().num_documents),
        arms=options.arms or (ARMS if len(mappers) == 1 else ESSENTIAL),
        data=f"{pair.corpus}, split test",
        progress=Meter("tokens"),
        keep=options.json and options.json.with_name(f"{options.json.name}.partial"),
    )
    timed = options.table or options.html or options.json or len(mappers) > 1
    judged = [
        report.Judged(folder, mapper, evaluation, measure(mapper) if timed else None)
        for folder, mapper, evaluation in zip(folders, mappers, evaluations, strict=True)
    ]
    print(comparison(judged) if options.table or len(judged) > 1 else evaluation_table(evaluations[0]))
    if options.write:
        for folder, evaluation in zip(folders, evaluations, strict=True):
            _store(folder, evaluation)
    if options.json:
        told = [each.told for each in judged]
        write(options.json, json.dumps(told[0] if len(told) == 1 else {"bundles": told}, indent=1) + "\n")
    if options.html:
        write(options.html, report.page(judged, rows))


def _diagnosed(mapper: Mapper, models: tuple[Any, Any], pair: Pair, options: argparse.Namespace) -> list[Row]:
    protocol = _protocol(options, DIAGNOSED)
    rows = diagnose(mapper, *models, pair.documents("tune"), protocol, Meter("documents"))
    print(diagnosis_table(rows))
    return rows


def _store(folder: str, evaluation: Evaluation) -> None:
    update(folder, evaluation=evaluation)
    say(f"stored in {folder}; " + (load(folder).refusal() or "it passes its gate"))
