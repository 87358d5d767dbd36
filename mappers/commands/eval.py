"""Evaluate a bundle on the fixed quality protocol, next to its controls; or compare several bundles.

kvrelay eval smol
kvrelay eval smol --diagnose
kvrelay eval bundles/mine --source SMALL --target LARGE --data talks.jsonl --write --html report.html
kvrelay eval bundles/ridge bundles/lowrank --family smol
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mappers.arms import ARMS, COMPARISON_ARMS, check_arms
from mappers.bundle import MANIFEST, load, update
from mappers.commands.common import (
    Meter,
    Pair,
    add_pair_options,
    check_device,
    check_writable,
    check_writable_folder,
    pair_of_family,
    pair_of_options,
    resumable,
    run,
    say,
    token_counts,
    write,
)
from mappers.diagnose import PartScore, diagnose
from mappers.errors import MapperError
from mappers.evaluate import evaluate
from mappers.families import find_family
from mappers.fingerprint import default_cache_folder, fingerprint, tokenizer_digest
from mappers.mapper import Mapper
from mappers.models import load_model, local_folder
from mappers.protocol import QualityProtocol
from mappers.report import EvaluatedBundle, comparison, diagnosis_json, diagnosis_table, evaluation_table, page
from mappers.speed import measure

GREEDY_TOKENS = 128
DIAGNOSIS_DOCUMENTS = 4


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    return run("eval", lambda: _eval(options))


def _eval(options: argparse.Namespace) -> None:
    _check(options)
    pair, folders = _resolve(options)
    mappers = [load(folder, options.device) for folder in folders]
    for folder in folders if options.write else ():
        check_writable_folder(folder)
    models = _models(pair, mappers, options.device, options.dtype)
    rows: list[PartScore] = []
    if options.diagnose:
        protocol = _protocol(options, DIAGNOSIS_DOCUMENTS)
        rows = diagnose(mappers[0], *models, pair.documents("tune"), protocol, Meter("documents"))
        print(diagnosis_table(rows))
    if not options.diagnose or options.html:
        _evaluate(mappers, folders, models, pair, options, rows)
    elif options.json:
        write(options.json, _dump({"bundle": mappers[0].bundle_id, **_diagnosis(rows, pair)}))


def _parser() -> argparse.ArgumentParser:
    fixed = QualityProtocol()
    parser = argparse.ArgumentParser(
        prog="kvrelay eval", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundles", nargs="+", metavar="BUNDLE", help="a bundle's folder, or an embedded family")
    parser.add_argument("--family", help="family whose models and text are used for bundles given as folders")
    add_pair_options(parser)
    parser.add_argument(
        "--documents",
        type=int,
        help=f"documents at each length (default {fixed.num_documents}; for --diagnose {DIAGNOSIS_DOCUMENTS})",
    )
    for name, default, text in (
        ("controls", fixed.num_controls, "documents for the controls"),
        ("head", fixed.head, "first tokens prefilled natively"),
        ("tail", fixed.tail, "last tokens prefilled natively"),
        ("scored", fixed.scored, "tokens scored after each prefix"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{text} (default %(default)s)")
    parser.add_argument(
        "--lengths", type=token_counts, default=fixed.lengths, help="prefix lengths (default 384,1024,2048)"
    )
    parser.add_argument(
        "--greedy",
        type=int,
        nargs="?",
        const=GREEDY_TOKENS,
        default=0,
        metavar="TOKENS",
        help=f"also compare greedy generation (of {GREEDY_TOKENS} tokens without a number); slow",
    )
    parser.add_argument(
        "--arms",
        type=lambda text: tuple(text.split(",")),
        help=f"arms out of {', '.join(ARMS)} (default all; for several bundles {', '.join(COMPARISON_ARMS)})",
    )
    parser.add_argument("--table", action="store_true", help="print one line per bundle, with its size and map time")
    parser.add_argument("--diagnose", action="store_true", help="locate the error, on the tune split")
    parser.add_argument(
        "--write", action="store_true", help="store figures and report in the bundle, where the gate checks them"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write an HTML report to FILE")
    return parser


def _check(options: argparse.Namespace) -> None:
    _protocol(options, DIAGNOSIS_DOCUMENTS)  # raises for impossible settings
    check_device(options.device)
    check_arms(options.arms or ())
    if options.diagnose and len(options.bundles) > 1:
        raise MapperError(f"--diagnose with {len(options.bundles)} bundles; allowed: one")
    if options.diagnose and (options.write or options.table) and not options.html:
        raise MapperError("--diagnose evaluates nothing for --write or --table; allowed: add --html for both")
    check_writable(options.json, options.html)


def _resolve(options: argparse.Namespace) -> tuple[Pair, list[str]]:
    """Return the pair of models, and the bundles' folders."""
    found = [(name, (Path(name) / MANIFEST).exists()) for name in options.bundles]
    families = {name: find_family(name) for name, is_folder in found if not is_folder}
    if options.family:
        families = {options.family: find_family(options.family), **families}
    folders = [name if is_folder else str(families[name].bundle) for name, is_folder in found]
    if len(families) > 1:
        raise MapperError(f"families {', '.join(families)}; allowed: one, whose models all bundles are evaluated on")
    for family in families.values():
        return pair_of_family(family, options), folders
    return pair_of_options(options), folders


def _models(pair: Pair, mappers: Sequence[Mapper], device: str, dtype: str) -> tuple[Any, Any]:
    folders = local_folder(pair.source), local_folder(pair.target)
    for mapper in mappers:
        mapper.check(fingerprint(folders[0]), fingerprint(folders[1]))
        mapper.check_tokenizers(tokenizer_digest(folders[0]), tokenizer_digest(folders[1]))
    return load_model(folders[0], device, dtype), load_model(folders[1], device, dtype)


def _protocol(options: argparse.Namespace, documents: int) -> QualityProtocol:
    return QualityProtocol(
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
    rows: list[PartScore],
) -> None:
    """Evaluate and report. The progress file is kept until everything is written."""
    protocol = _protocol(options, QualityProtocol().num_documents)
    arms = options.arms or (ARMS if len(mappers) == 1 else COMPARISON_ARMS)
    progress_file = _progress_file(mappers, protocol, arms, options.dtype)
    with resumable(progress_file):
        results = evaluate(
            mappers,
            *models,
            pair.documents("test"),
            protocol,
            arms=arms,
            data=f"{pair.corpus}, split test",
            progress=Meter("tokens"),
            progress_file=progress_file,
        )
        is_timed = options.table or options.html or options.json or options.write or len(mappers) > 1
        bundles = [
            EvaluatedBundle(name, mapper, result.evaluation, measure(mapper) if is_timed else None)
            for name, mapper, result in zip(options.bundles, mappers, results, strict=True)
        ]
        _report(bundles, folders, pair, options, rows)
    if progress_file:
        progress_file.unlink(missing_ok=True)


def _report(
    bundles: list[EvaluatedBundle], folders: list[str], pair: Pair, options: argparse.Namespace, rows: list[PartScore]
) -> None:
    """Print and write the figures, last into the bundles."""
    print(comparison(bundles) if options.table or len(bundles) > 1 else evaluation_table(bundles[0].evaluation))
    if options.json:
        values = bundles[0].as_json() if len(bundles) == 1 else {"bundles": [each.as_json() for each in bundles]}
        write(options.json, _dump(values | ({"diagnosis": _diagnosis(rows, pair)} if rows else {})))
    if options.html:
        write(options.html, page(bundles, rows))
    if options.write:
        for folder, each in zip(folders, bundles, strict=True):
            # The stored report names the bundle by its folder alone, wherever that is.
            report = page([replace(each, name=Path(folder).absolute().name)], rows)
            update(folder, evaluation=each.evaluation, report=report)
            say(f"stored in {folder}; " + (load(folder).refusal() or "it passes its gate"))


def _progress_file(
    mappers: Sequence[Mapper], protocol: QualityProtocol, arms: Sequence[str], dtype: str
) -> Path | None:
    """Return the file with the scores so far of this very evaluation, None if it cannot be written."""
    key = [[mapper.bundle_id for mapper in mappers], vars(protocol), arms, dtype]
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()
    file = default_cache_folder() / "evaluations" / f"{digest[:16]}.jsonl"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        check_writable(file)
    except (OSError, MapperError) as error:
        say(f"an interrupted evaluation will start over: {error}")
        return None
    if file.exists():
        say(f"resuming from {file}; remove it to start over")
    return file


def _diagnosis(rows: list[PartScore], pair: Pair) -> dict[str, Any]:
    return {"data": f"{pair.corpus}, split tune", "rows": diagnosis_json(rows)}


def _dump(values: dict[str, Any]) -> str:
    return json.dumps(values, indent=1) + "\n"
