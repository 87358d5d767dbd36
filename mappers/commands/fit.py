"""Fit a mapper from one model's KV cache to another's, and write it as a bundle.

kvrelay fit smol --out bundles/smol
kvrelay fit --source SMALL --target LARGE --data talks.jsonl --out bundles/mine
"""

from __future__ import annotations

import argparse
import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from mappers.bundle import MANIFEST, check_replaceable, load_manifest, save
from mappers.cache import KVGeometry
from mappers.collect import max_document_tokens, num_training_rows, statistics_bytes, usable_documents
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
)
from mappers.errors import CalibrationTooSmall, MapperError
from mappers.families import ModelFamily, find_family
from mappers.fingerprint import read_config
from mappers.fit import check_enough, fit
from mappers.manifest import Manifest, OutputSpec, QualityGate
from mappers.model_config import config_of, geometry_of
from mappers.models import local_folder
from mappers.settings import AUTO, FitSettings

DEFAULT_TOKENS = 100_000


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    return run("fit", lambda: _fit(options))


def _fit(options: argparse.Namespace) -> None:
    # 1. Report errors before anything is prepared, or at least before a model is loaded.
    settings = _settings(options)
    family = find_family(options.family) if options.family else None
    out = _out(options, family)
    _check(out, options)
    pair = pair_of_family(family, options) if family else pair_of_options(options)
    plan = FitPlan.of(pair, settings)
    say(plan.summary(options.tokens))
    checkpoint = _checkpoint(out, options)
    settings = replace(settings, tokens=plan.num_tokens, data=f"{pair.corpus}, split calibrate", checkpoint=checkpoint)
    # 2. Fit. An interrupt leaves the checkpoint.
    with resumable(checkpoint):
        mapper = fit(
            pair.source,
            pair.target,
            plan.documents,
            settings,
            progress=Meter("tokens"),
            choosing=Meter("outputs"),
            say=say,
        )
        print(_summary(save(mapper, out).manifest))
    # 3. The checkpoint is no longer needed.
    if checkpoint and not options.statistics:
        checkpoint.unlink(missing_ok=True)
    print(f"written to {out}")
    say(f"workers refuse it until it is evaluated: {_eval_command(out, options)}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvrelay fit", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("family", nargs="?", help="an embedded family, instead of --source, --target and --data")
    add_pair_options(parser)
    parser.add_argument("--out", metavar="FOLDER", help="folder of the bundle (default: the family's own)")
    parser.add_argument("--replace", action="store_true", help="replace a bundle that has been evaluated")
    _add_fit_options(parser)
    parser.set_defaults(tokens=DEFAULT_TOKENS)
    parser.add_argument("--rank", type=int, help="rank for method lowrank (default: chosen for each output)")
    parser.add_argument(
        "--checkpoint-minutes",
        type=float,
        default=FitSettings.checkpoint_s / 60,
        help="interval between checkpoints, saved beside --out, from which a killed fit resumes (default %(default)s)",
    )
    parser.add_argument("--no-checkpoint", action="store_true", help="neither save checkpoints nor resume from one")
    parser.add_argument(
        "--statistics",
        metavar="FILE",
        help="keep the statistics in this file and resume from it, so that another method needs no prefill",
    )
    parser.add_argument("--max-ppl-ratio", type=float, help="max perplexity ratio of the bundle's own gate")
    parser.add_argument("--min-top1", type=float, help="min top-1 agreement of the bundle's own gate")
    parser.add_argument(
        "--gate-lengths", dest="lengths", type=token_counts, metavar="TOKENS", help="prefix lengths the gate requires"
    )
    parser.add_argument(
        "--gate-documents", dest="min_documents", type=int, help="test documents the gate requires at each length"
    )
    return parser


def _add_fit_options(parser: argparse.ArgumentParser) -> None:
    """Add an option for each field of `FitSettings` with a help text."""
    for field in fields(FitSettings):
        arguments = dict(field.metadata)
        if "help" not in arguments:
            continue
        name = field.name.replace("_", "-")
        if field.default is False:
            parser.add_argument(f"--{name}", action="store_true", **arguments)
        elif field.default is True:
            parser.add_argument(f"--no-{name}", dest=field.name, action="store_false", **arguments)
        else:
            arguments |= {"help": f"{arguments['help']} (default %(default)s)", "default": field.default}
            arguments.setdefault("type", _layers if name == "layers" else type(field.default))
            parser.add_argument(f"--{name}", **arguments)


def _layers(text: str) -> int | str:
    if text != AUTO and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}; allowed: 1 or more, or {AUTO}")
    return text if text == AUTO else int(text)


def _settings(options: argparse.Namespace) -> FitSettings:
    gate = {name: getattr(options, name) for name in ("max_ppl_ratio", "min_top1", "lengths", "min_documents")}
    gate = {name: bound for name, bound in gate.items() if bound is not None}
    return FitSettings(
        **{field.name: getattr(options, field.name) for field in fields(FitSettings) if "help" in field.metadata},
        method_options={} if options.rank is None else {"rank": options.rank},
        device=options.device,
        dtype=options.dtype,
        gate=QualityGate(**gate) if gate else None,
        checkpoint_s=60 * options.checkpoint_minutes,
        keep_checkpoint=options.statistics is not None,
    )


def _out(options: argparse.Namespace, family: ModelFamily | None) -> Path:
    if options.out is not None:
        return Path(options.out)
    if family is None:
        raise MapperError("--out is missing: name a folder for the bundle")
    return family.bundle


def _check(out: Path, options: argparse.Namespace) -> None:
    """Raise `MapperError` for impossible options before a family is prepared, a model downloaded or data read."""
    check_device(options.device)
    if options.statistics is not None:
        check_writable(Path(options.statistics))
    _check_range("checkpoint_minutes", options.checkpoint_minutes, 0)
    _check_range("max_ppl_ratio", options.max_ppl_ratio, 1)
    _check_range("min_top1", options.min_top1, 0, 1)
    _check_range("gate_documents", options.min_documents, 1)
    for length in options.lengths or ():
        _check_range("gate_lengths", length, 1)
    check_replaceable(out)
    check_writable_folder(next(folder for folder in out.absolute().parents if folder.exists()))
    if (out / MANIFEST).exists() and not options.replace and load_manifest(out).evaluation:
        raise MapperError(f"{out} is a bundle that has been evaluated; allowed: another folder (--out), or --replace")


def _check_range(name: str, value: float | None, least: float, most: float = math.inf) -> None:
    if value is not None and not least <= value <= most:  # also refuses NaN
        allowed = f"{least} to {most}" if most < math.inf else f"{least} or more"
        raise MapperError(f"{name} is {value}; allowed: {allowed}")


@dataclass(frozen=True)
class FitPlan:
    """Documents to prefill, and the max memory of their statistics.

    All token ids are kept, so that bad data shows before a model is loaded and progress has a total.
    """

    documents: list[list[int]]
    geometries: tuple[KVGeometry, KVGeometry]
    statistics_bytes: int

    @classmethod
    def of(cls, pair: Pair, settings: FitSettings) -> FitPlan:
        """Take the first documents of the calibration split, up to `settings.tokens` tokens.

        Raises `CalibrationTooSmall` for fewer than the method needs, `DataUnreadable` for none.
        """
        assert settings.tokens is not None
        documents = pair.documents("calibrate")  # reads the first one, before a config is downloaded
        configs = [read_config(local_folder(name)) for name in (pair.source, pair.target)]
        source, target = map(geometry_of, configs)
        chosen: list[list[int]] = []
        missing = settings.tokens
        for ids in usable_documents(documents, settings.head, max_document_tokens(map(config_of, configs))):
            chosen.append(ids)
            missing -= len(ids)
            if missing <= 0:
                break
        if not chosen:
            raise CalibrationTooSmall(f"no document of {pair.corpus} has more than {settings.head + 1} tokens")
        check_enough(num_training_rows(map(len, chosen), settings), settings, source, target)
        num_tokens = sum(map(len, chosen))
        needed = statistics_bytes(source, target, settings, configs[1].get("hidden_size", 0), num_tokens)
        return cls(chosen, (source, target), needed)

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.documents))

    def summary(self, num_requested: int) -> str:
        source, target = self.geometries
        shortage = "" if self.num_tokens >= num_requested else f", fewer than the {num_requested} requested"
        return (
            f"{self.num_tokens} tokens in {len(self.documents)} documents{shortage}\n"
            f"{source.num_layers} layers of {source.num_kv_heads} x {source.head_dim} to {target.num_layers} of "
            f"{target.num_kv_heads} x {target.head_dim}; statistics take up to {self.statistics_bytes / 1e9:.1f} GB "
            f"besides the models"
        )


def _checkpoint(out: Path, options: argparse.Namespace) -> Path | None:
    if options.no_checkpoint and not options.statistics:
        return None
    out = out.absolute()
    file = Path(options.statistics or out.with_name(f".{out.name}.partial"))
    if file.exists():
        say(f"resuming from {file}; remove it to start over")
    return file


def _eval_command(out: Path, options: argparse.Namespace) -> str:
    arguments = {
        "--family": options.family,
        "--source": options.source,
        "--target": options.target,
        "--data": options.data,
        "--lengths": ",".join(map(str, options.lengths or ())),
        "--documents": options.min_documents,
        "--device": options.device if options.device != "cpu" else None,
        "--dtype": options.dtype if options.dtype != "float32" else None,
    }
    given = [part for option, value in arguments.items() if value for part in (option, str(value))]
    return shlex.join(["kvrelay", "eval", str(out), *given, "--write"])


def _summary(manifest: Manifest) -> str:
    """Return a line on the bundle and one per fitted layer."""
    copied = ", ".join(map(str, manifest.copied_layers)) or "none"
    rows = [f"bundle {manifest.bundle_id}, {manifest.calibration.num_tokens} tokens, copied layers: {copied}"]
    for layer, spec in enumerate(manifest.layers):
        if layer not in manifest.copied_layers:
            rows.append(f"layer {layer:3d}   keys {_describe(spec.keys)}   values {_describe(spec.values)}")
    return "\n".join(rows)


def _describe(spec: OutputSpec) -> str:
    layers = ",".join(map(str, sorted({*spec.key_layers, *spec.value_layers})))
    return f"{spec.method} of {layers}" + (f" (R² {spec.r2:.3f})" if spec.r2 is not None else "")
