"""Fit a mapper from one model's KV cache to another's, and write it as a bundle.

kvrelay fit smol --out bundles/smol
kvrelay fit --source SMALL --target LARGE --data talks.jsonl --out bundles/mine
"""

from __future__ import annotations

import argparse
import math
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from mappers import methods
from mappers.attention import EFFECTIVE_SHARE, Weighting
from mappers.bundle import MANIFEST, check_replaceable, load_manifest, save
from mappers.cache import KVGeometry
from mappers.checkpoint import EVERY_S
from mappers.choose import AUTO, WAYS
from mappers.collect import Reading, longest_of, planned_bytes, rows_to_fit, usable
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
)
from mappers.errors import CalibrationTooSmall, MapperError
from mappers.families import ModelFamily, find_family
from mappers.fingerprint import read_config
from mappers.fit import DEFAULT_HEAD, DEFAULT_LAYERS, Layers, check_enough, check_settings, fit
from mappers.manifest import Manifest, Precision, QualityGate
from mappers.methods import Method
from mappers.model_config import config_of, geometry_of
from mappers.models import local_folder

DEFAULT_TOKENS = 100_000


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    return run("fit", lambda: _fit(options))


def _fit(options: argparse.Namespace) -> None:
    # 1. What can be wrong is told before anything is prepared, or else before a model is loaded.
    method = methods.get(options.method, **_method_options(options))
    family = find_family(options.family) if options.family else None
    out = _out(options, family)
    _check(method, out, options)
    pair = pair_of_family(family, options) if family else pair_of_options(options)
    planned = FitPlan.of(pair, method, options.layers, _reading(method, options), options.tokens)
    say(planned.told(options.tokens))
    checkpoint = _checkpoint(out, options)
    # 2. A fit that is broken off leaves what was read.
    with resumable(checkpoint):
        mapper = fit(
            pair.source,
            pair.target,
            planned.documents,
            method=options.method,
            layers=options.layers,
            joint=options.joint,
            choose=options.choose,
            weighting=options.weighting,
            effective_share=options.effective_share,
            copies=options.copies,
            head=options.head,
            tokens=planned.num_tokens,
            precision=options.precision,
            data=f"{pair.corpus}, split calibrate",
            gate=_gate(options),
            device=options.device,
            dtype=options.dtype,
            checkpoint=checkpoint,
            checkpoint_s=60 * options.checkpoint_minutes,
            keep=options.statistics is not None,
            progress=Meter("tokens"),
            choosing=Meter("outputs"),
            say=say,
            **_method_options(options),
        )
        print(_described(save(mapper, out).manifest))
    # 3. Nothing of it is needed any more.
    if checkpoint and not options.statistics:
        checkpoint.unlink(missing_ok=True)
    print(f"written to {out}")
    say(f"no worker takes it before it is judged: {_judging(out, options)}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvrelay fit", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("family", nargs="?", help="an embedded family, in place of the three options that follow")
    add_pair_options(parser)
    parser.add_argument("--out", metavar="FOLDER", help="where the bundle goes (default: the family's own place)")
    parser.add_argument("--replace", action="store_true", help="put it in the place of a bundle that has been judged")
    parser.add_argument("--method", default="ridge", help=f"one of {', '.join(sorted(methods.METHODS))}")
    parser.add_argument(
        "--layers", type=_layers, default=DEFAULT_LAYERS, help="source layers a target layer, at most, or auto"
    )
    parser.add_argument("--rank", type=int, help="of method lowrank (default: each output's own)")
    parser.add_argument("--joint", action="store_true", help="compute keys from keys and values, and values as well")
    parser.add_argument(
        "--no-copies", dest="copies", action="store_false", help="fit layers that both models share like any other"
    )
    parser.add_argument("--choose", default="top", help=f"how source layers are chosen: {', '.join(sorted(WAYS))}")
    parser.add_argument("--weighting", default="uniform", help=f"of tokens: {', '.join(get_args(Weighting))}")
    parser.add_argument(
        "--effective-share",
        type=float,
        default=EFFECTIVE_SHARE,
        help="weights are shrunk until tokens tell as much as this share of equal ones (default %(default)s)",
    )
    parser.add_argument("--tokens", type=int, default=DEFAULT_TOKENS, help="tokens to read (default %(default)s)")
    parser.add_argument("--head", type=int, default=DEFAULT_HEAD, help="first tokens that are left out of the fit")
    parser.add_argument("--precision", choices=get_args(Precision), default="float16", help="of the stored weights")
    parser.add_argument(
        "--checkpoint-minutes",
        type=float,
        default=EVERY_S / 60,
        help="how often what was read is saved beside --out, so that a killed fit can go on (default %(default)s)",
    )
    parser.add_argument("--no-checkpoint", action="store_true", help="neither save what was read, nor go on from it")
    parser.add_argument(
        "--statistics",
        metavar="FILE",
        help="keep what was read in this file and go on from it, so that another method costs no reading",
    )
    parser.add_argument("--max-ppl-ratio", type=float, help="give the bundle a gate of its own")
    parser.add_argument("--min-top1", type=float, help="give the bundle a gate of its own")
    parser.add_argument(
        "--gate-lengths", dest="lengths", type=numbers, metavar="TOKENS", help="prefix lengths that it asks for"
    )
    parser.add_argument(
        "--gate-documents", dest="min_documents", type=int, help="test documents that it asks for at each of them"
    )
    return parser


def _layers(text: str) -> int | str:
    if text != AUTO and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}; allowed: 1 and more, {AUTO}")
    return text if text == AUTO else int(text)


def _method_options(options: argparse.Namespace) -> dict[str, Any]:
    return {} if options.rank is None else {"rank": options.rank}


def _out(options: argparse.Namespace, family: ModelFamily | None) -> Path:
    if options.out is not None:
        return Path(options.out)
    if family is None:
        raise MapperError("--out missing: where is the bundle to go?")
    return family.bundle


def _reading(method: methods.Method, options: argparse.Namespace) -> Reading:
    return Reading(
        options.joint, options.copies, options.head, method.predicts_hidden, options.weighting, options.effective_share
    )


def _check(method: methods.Method, out: Path, options: argparse.Namespace) -> None:
    """Refuse what can't work before a family is prepared, a model fetched or a file read."""
    check_settings(
        method,
        options.layers,
        options.joint,
        options.choose,
        options.weighting,
        options.effective_share,
        options.head,
        options.tokens,
        options.precision,
    )
    check_device(options.device)
    if options.statistics is not None:
        check_writable(Path(options.statistics))
    _check_range("checkpoint_minutes", options.checkpoint_minutes, 0)
    _check_range("max_ppl_ratio", options.max_ppl_ratio, 1)
    _check_range("min_top1", options.min_top1, 0, 1)
    _check_range("gate_documents", options.min_documents, 1)
    for length in options.lengths or ():
        _check_range("gate_lengths", length, 1)
    _check_out(out, options.replace)


def _check_range(name: str, value: float | None, least: float, most: float = math.inf) -> None:
    if value is not None and not least <= value <= most:  # nor NaN
        allowed = f"{least} to {most}" if most < math.inf else f"{least} and more"
        raise MapperError(f"{name} is {value}; allowed: {allowed}")


def _check_out(out: Path, may_replace: bool) -> None:
    check_replaceable(out)
    check_writable_folder(next(folder for folder in out.absolute().parents if folder.exists()))
    if (out / MANIFEST).exists() and not may_replace and load_manifest(out).evaluation:
        raise MapperError(f"{out} is a bundle that has been judged; allowed: another place (--out), or --replace")


def _checkpoint(out: Path, options: argparse.Namespace) -> Path | None:
    if options.no_checkpoint and not options.statistics:
        return None
    out = out.absolute()
    file = Path(options.statistics or out.with_name(f".{out.name}.partial"))
    if file.exists():
        say(f"going on from {file}; remove it to begin anew")
    return file


def _gate(options: argparse.Namespace) -> QualityGate | None:
    given = {name: getattr(options, name) for name in ("max_ppl_ratio", "min_top1", "lengths", "min_documents")}
    given = {name: value for name, value in given.items() if value is not None}
    return QualityGate(**given) if given else None


def _judging(out: Path, options: argparse.Namespace) -> str:
    """The command that does."""
    asked = {
        "--family": options.family,
        "--source": options.source,
        "--target": options.target,
        "--data": options.data,
        "--lengths": ",".join(map(str, options.lengths or ())),
        "--documents": options.min_documents,
        "--device": options.device if options.device != "cpu" else None,
        "--dtype": options.dtype if options.dtype != "float32" else None,
    }
    given = [part for option, value in asked.items() if value for part in (option, str(value))]
    return shlex.join(["kvrelay", "eval", str(out), *given, "--write"])


def _described(manifest: Manifest) -> str:
    rows = [f"bundle {manifest.bundle_id}, {manifest.calibration.num_tokens} tokens, layers copied: "]
    rows[0] += ", ".join(map(str, manifest.copied_layers)) or "none"
    for layer, spec in enumerate(manifest.layers):
        if layer not in manifest.copied_layers:
            parts = [f"{kind} {_output(spec.of(kind))}" for kind in ("keys", "values")]
            rows.append(f"layer {layer:3d}   " + "   ".join(parts))
    return "\n".join(rows)


def _output(spec: Any) -> str:
    layers = ",".join(map(str, sorted({*spec.key_layers, *spec.value_layers})))
    return f"{spec.method} of {layers}" + (f" (R² {spec.r2:.3f})" if spec.r2 is not None else "")


@dataclass(frozen=True)
class FitPlan:
    """Documents for two models to read, and the memory that statistics of them take at most."""

    documents: list[list[int]]
    geometries: tuple[KVGeometry, KVGeometry]
    statistics_bytes: int

    @classmethod
    def of(cls, pair: Pair, method: Method, layers: Layers, reading: Reading, num_tokens: int) -> FitPlan:
        """The first documents of the calibration split, of so many tokens if there are as many.

        Raises `CalibrationTooSmall` for fewer than `method` needs to map this pair, `DataUnreadable` for none.
        """
        documents = pair.documents("calibrate")  # whose first is read by now: there may be much to fetch
        configs = [read_config(local_folder(name)) for name in (pair.source, pair.target)]
        source, target = map(geometry_of, configs)
        read = usable(documents, reading.head, longest_of(map(config_of, configs)))
        found = list(_first(read, num_tokens))
        if not found:
            raise CalibrationTooSmall(f"no document of {pair.corpus} has more than {reading.head + 1} tokens")
        check_enough(rows_to_fit(map(len, found), reading), method, (source, target), layers, reading)
        needed = planned_bytes(source, target, reading, configs[1].get("hidden_size", 0), _count(found))
        return cls(found, (source, target), needed)

    @property
    def num_tokens(self) -> int:
        return _count(self.documents)

    def told(self, num_asked: int) -> str:
        """What is about to happen, if so many tokens were asked for."""
        source, target = self.geometries
        enough = "" if self.num_tokens >= num_asked else f", all that there are of the {num_asked} asked for"
        return (
            f"{self.num_tokens} tokens in {len(self.documents)} documents{enough}\n"
            f"{source.num_layers} layers of {source.num_kv_heads} x {source.head_dim} onto {target.num_layers} of "
            f"{target.num_kv_heads} x {target.head_dim}; statistics take at most {self.statistics_bytes / 1e9:.1f} GB "
            f"beside the models"
        )


def _first(documents: Iterable[list[int]], num_tokens: int) -> Iterator[list[int]]:
    for ids in documents:
        yield ids
        num_tokens -= len(ids)
        if num_tokens <= 0:
            return


def _count(documents: Sequence[Sequence[int]]) -> int:
    return sum(map(len, documents))
