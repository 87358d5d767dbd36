"""Judge a bundle on the fixed quality protocol, beside its controls.

    kvrelay eval smol
    kvrelay eval bundles/mine --source SMALL --target LARGE --data talks.jsonl --write
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mappers.arms import ARMS
from mappers.bundle import MANIFEST, load, update
from mappers.commands.pair import Meter, Pair, add_pair_options, pair_of_family, pair_of_options, say
from mappers.errors import MapperError
from mappers.evaluate import evaluate
from mappers.families import find_family
from mappers.fingerprint import fingerprint
from mappers.manifest import ArmScore, Evaluation
from mappers.mapper import Mapper
from mappers.models import load_model, local_folder
from mappers.protocol import Protocol

GREEDY = 128


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    try:
        pair, bundle = _resolve(options)
        mapper = load(bundle, options.device)
        evaluation = _evaluate(mapper, pair, options)
        print(_table(evaluation))
        if options.write:
            update(bundle, evaluation=evaluation)
            say(f"stored in {bundle}; " + (load(bundle).refusal() or "it passes its gate"))
        if options.json:
            options.json.write_text(json.dumps(_report(mapper, evaluation), indent=1) + "\n")
    except MapperError as error:
        print(f"kvrelay eval: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    fixed = Protocol()
    parser = argparse.ArgumentParser(
        prog="kvrelay eval", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle", help="a bundle's folder, or an embedded family")
    add_pair_options(parser)
    parser.add_argument("--documents", type=int, default=fixed.num_documents, help="at each length (%(default)s)")
    parser.add_argument("--controls", type=int, default=fixed.num_controls, help="of these, for controls (%(default)s)")
    parser.add_argument("--lengths", type=_numbers, default=fixed.lengths, help="prefix lengths (384,1024,2048)")
    parser.add_argument("--head", type=int, default=fixed.head, help="first tokens read natively (default %(default)s)")
    parser.add_argument("--tail", type=int, default=fixed.tail, help="last tokens read natively (default %(default)s)")
    parser.add_argument("--scored", type=int, default=fixed.scored, help="tokens scored behind (default %(default)s)")
    parser.add_argument(
        "--greedy", type=int, nargs="?", const=GREEDY, default=0, metavar="TOKENS", help="also generate freely; slow"
    )
    parser.add_argument("--arms", type=lambda text: tuple(text.split(",")), default=ARMS, help=f"of {', '.join(ARMS)}")
    parser.add_argument("--write", action="store_true", help="store the result in the bundle, where its gate reads it")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    return parser


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _resolve(options: argparse.Namespace) -> tuple[Pair, str]:
    if (Path(options.bundle) / MANIFEST).exists():
        return pair_of_options(options), options.bundle
    family = find_family(options.bundle)
    return pair_of_family(family, options), str(family.bundle)


def _evaluate(mapper: Mapper, pair: Pair, options: argparse.Namespace) -> Evaluation:
    folders = local_folder(pair.source), local_folder(pair.target)
    mapper.check(fingerprint(folders[0]), fingerprint(folders[1]))
    protocol = Protocol(
        options.lengths,
        options.documents,
        options.head,
        options.tail,
        options.scored,
        options.controls,
        options.greedy,
    )
    return evaluate(
        mapper,
        load_model(folders[0], options.device),
        load_model(folders[1], options.device),
        pair.documents("test"),
        protocol,
        arms=options.arms,
        data=f"{pair.corpus}, split test",
        progress=Meter("tokens"),
        keep=options.json and options.json.with_name(f"{options.json.name}.partial"),
    )


def _report(mapper: Mapper, evaluation: Evaluation) -> dict[str, Any]:
    return {"bundle": mapper.bundle_id, **evaluation.model_dump(mode="json")}


def _table(evaluation: Evaluation) -> str:
    names = f"{'top-1':>7}{'KL mean':>9}{'KL p95':>9}{'documents':>11}"
    lines = [f"{'arm':<16}{'ppl ratio':>10}  {'95% interval':<16}{names}"]
    lines += [_row(score.arm, score) for score in evaluation.arms]
    for at in evaluation.lengths:
        lines += [_row(f"hybrid {at.length}", score) for score in at.arms if score.arm == "hybrid"]
    if evaluation.attention:
        worst = min(evaluation.attention, key=lambda layer: layer.mean)
        mean = sum(layer.mean for layer in evaluation.attention) / len(evaluation.attention)
        lines.append(f"attention output, cosine: mean {mean:.4f}; lowest in layer {worst.layer}: {worst.mean:.4f}")
    if evaluation.greedy:
        found = evaluation.greedy
        lines.append(
            f"greedy, {found.tokens} tokens: {found.agreement:.3f} of the tokens agree, {found.identical:.2f} of "
            f"{found.generations} generations are identical"
        )
    return "\n".join(lines)


def _row(name: str, score: ArmScore) -> str:
    interval = f"{score.ppl_low:.3f}-{score.ppl_high:.3f}"
    figures = f"{score.top1:>7.3f}{score.kl_mean:>9.4f}{score.kl_p95:>9.4f}{score.documents:>11}"
    return f"{name:<16}{score.ppl_ratio:>10.4f}  {interval:<16}{figures}"
