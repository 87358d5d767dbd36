"""Judge a bundle on the fixed quality protocol, beside its controls; or several side by side.

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

from mappers import report
from mappers.arms import ARMS, ESSENTIAL, check_arms
from mappers.bundle import MANIFEST, load, update
from mappers.commands.common import (
    Meter,
    Pair,
    add_pair_options,
    check_device,
    check_writable,
    check_writable_folder,
    numbers,
    pair_of_family,
    pair_of_options,
    resumable,
    run,
    say,
    write,
)
from mappers.diagnose import PartScore, diagnose
from mappers.errors import MapperError
from mappers.evaluate import evaluate_all
from mappers.families import find_family
from mappers.fingerprint import default_cache_folder, fingerprint, tokenizer_digest
from mappers.mapper import Mapper
from mappers.models import load_model, local_folder
from mappers.protocol import QualityProtocol
from mappers.speed import measure
from mappers.tables import comparison, diagnosis_table, evaluation_table

GREEDY = 128
DIAGNOSED = 4  # documents, unless told otherwise


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
    rows = _diagnosed(mappers[0], models, pair, options) if options.diagnose else []
    if not options.diagnose or options.html:
        _evaluate(mappers, folders, models, pair, options, rows)
    elif options.json:
        write(options.json, _as_json({"bundle": mappers[0].bundle_id, **_diagnosis(rows, pair)}))


def _parser() -> argparse.ArgumentParser:
    fixed = QualityProtocol()
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
    parser.add_argument("--lengths", type=numbers, default=fixed.lengths, help="prefix lengths (384,1024,2048)")
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
    parser.add_argument("--write", action="store_true", help="store figures and report in the bundle, for its gate")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a report to look at to FILE")
    return parser


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
    """Every verdict is kept until all that was asked for is written."""
    protocol = _protocol(options, QualityProtocol().num_documents)
    arms = options.arms or (ARMS if len(mappers) == 1 else ESSENTIAL)
    keep = _keep(mappers, protocol, arms, options.dtype)
    with resumable(keep):
        evaluations = evaluate_all(
            mappers,
            *models,
            pair.documents("test"),
            protocol,
            arms=arms,
            data=f"{pair.corpus}, split test",
            progress=Meter("tokens"),
            keep=keep,
        )
        timed = options.table or options.html or options.json or options.write or len(mappers) > 1
        judged = [
            report.EvaluatedBundle(name, mapper, evaluation, measure(mapper) if timed else None)
            for name, mapper, evaluation in zip(options.bundles, mappers, evaluations, strict=True)
        ]
        _tell(judged, folders, pair, options, rows)
    if keep:
        keep.unlink(missing_ok=True)


def _tell(
    judged: list[report.EvaluatedBundle],
    folders: list[str],
    pair: Pair,
    options: argparse.Namespace,
    rows: list[PartScore],
) -> None:
    """To the user first, then to the bundles."""
    print(comparison(judged) if options.table or len(judged) > 1 else evaluation_table(judged[0].evaluation))
    if options.json:
        told = judged[0].told if len(judged) == 1 else {"bundles": [each.told for each in judged]}
        write(options.json, _as_json(told | ({"diagnosis": _diagnosis(rows, pair)} if rows else {})))
    if options.html:
        write(options.html, report.page(judged, rows))
    if options.write:
        for folder, each in zip(folders, judged, strict=True):
            _store(folder, each, rows)


def _keep(mappers: Sequence[Mapper], protocol: QualityProtocol, arms: Sequence[str], dtype: str) -> Path | None:
    """The file that holds the verdicts of this very evaluation until it is done; None where none can be written."""
    asked = [[mapper.bundle_id for mapper in mappers], vars(protocol), arms, dtype]
    digest = hashlib.sha256(json.dumps(asked).encode()).hexdigest()
    file = default_cache_folder() / "evaluations" / f"{digest[:16]}.jsonl"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        check_writable(file)
    except (OSError, MapperError) as error:
        say(f"if this is broken off it begins anew: {error}")
        return None
    if file.exists():
        say(f"going on from {file}; remove it to begin anew")
    return file


def _diagnosed(mapper: Mapper, models: tuple[Any, Any], pair: Pair, options: argparse.Namespace) -> list[PartScore]:
    protocol = _protocol(options, DIAGNOSED)
    rows = diagnose(mapper, *models, pair.documents("tune"), protocol, Meter("documents"))
    print(diagnosis_table(rows))
    return rows


def _diagnosis(rows: list[PartScore], pair: Pair) -> dict[str, Any]:
    return {"data": f"{pair.corpus}, split tune", "rows": report.told(rows)}


def _as_json(told: dict[str, Any]) -> str:
    return json.dumps(told, indent=1) + "\n"


def _store(folder: str, judged: report.EvaluatedBundle, rows: list[PartScore]) -> None:
    """Into the bundle, with a page of its own; the bundle is told by its folder's name, wherever that was."""
    page = report.page([replace(judged, name=Path(folder).absolute().name)], rows)
    update(folder, evaluation=judged.evaluation, report=page)
    say(f"stored in {folder}; " + (load(folder).refusal() or "it passes its gate"))
