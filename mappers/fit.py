"""Fits a mapper: two models read the same documents, and closed-form algebra does the rest."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, get_args

from torch import Tensor

from mappers import methods
from mappers.attention import EFFECTIVE_SHARE, AttentionJudge, Weighting, check_weighting
from mappers.bundle import seal
from mappers.cache import KVGeometry
from mappers.checkpoint import EVERY_S, Checkpoint
from mappers.choose import AUTO, Choice, Chooser, check_way
from mappers.collect import CalibrationStatistics, Progress, Reading, collect
from mappers.errors import CalibrationTooSmall, MapperError, TokenizerMismatch
from mappers.fingerprint import fingerprint, same_vocabulary, tokenizer_digest
from mappers.manifest import (
    COPY,
    MEASURED,
    Calibration,
    LayerSpec,
    Manifest,
    ModelCard,
    OutputSpec,
    Precision,
    QualityGate,
    Target,
    probe_name,
)
from mappers.mapper import Mapper
from mappers.methods.hidden import projections
from mappers.model_config import geometry_of
from mappers.models import config_dict, load_model, local_folder
from mappers.rope import Rope
from mappers.weights import mixed, stored

DEFAULT_HEAD = 4
DEFAULT_LAYERS = 4
LICENCE = "Fitted from the outputs of both models named here; the terms of both apply."

Layers = int | Literal["auto"]


def fit(
    source: str | Path,
    target: str | Path,
    documents: Iterable[Sequence[int]],
    *,
    method: str = "ridge",
    layers: Layers = DEFAULT_LAYERS,
    joint: bool = False,
    choose: str = "top",
    weighting: Weighting = "uniform",
    effective_share: float = EFFECTIVE_SHARE,
    copies: bool = True,
    head: int = DEFAULT_HEAD,
    tokens: int | None = None,
    precision: Precision = "float16",
    data: str = "unnamed",
    gate: QualityGate | None = None,
    licence: str = LICENCE,
    device: str = "cpu",
    dtype: str = "float32",
    checkpoint: str | Path | None = None,
    checkpoint_s: float = EVERY_S,
    keep: bool = False,
    progress: Progress | None = None,
    choosing: Progress | None = None,
    say: Callable[[str], None] | None = None,
    **options: Any,
) -> Mapper:
    """The map from the cache of model `source` to that of `target` (local folders or hub names).

    `documents` are token ids; memory does not grow with their number. Each target layer is computed from at most
    `layers` source layers (`auto`: as many as pay and the tokens allow), keys from keys and values from values, or both
    from both if `joint`, chosen the way `choose` (see `mappers.choose`); layers that the two models share are found and
    passed through, unless `copies` is false. Tokens count by `weighting` (see `mappers.attention`). `tokens` bounds how
    much is read, the first `head` tokens of a document are left out, `options` go to the method. Every eighth document
    is held out to choose by. `progress` is told tokens as they are read, `choosing` outputs as they are fitted.
    Both models are loaded in `dtype` (see `load_model`); statistics are float32 products and float64 sums whatever it
    is.
    `checkpoint` is a file of statistics, or of what they are made from, that is written every `checkpoint_s` seconds,
    when the reading is broken off, and at its end if it is for keeps (`keep`) or took long. A fit that finds one of the
    same models, documents and features goes on from there, by another method or to more tokens as well; it is the
    caller's to remove. Raises `MapperError`s: see `mappers.errors`.
    """
    # 1. Settings that can't work are refused before anything is loaded.
    chosen_method = methods.get(method, **options)
    check_settings(chosen_method, layers, joint, choose, weighting, effective_share, head, tokens, precision)
    reading = Reading(joint, copies, head, chosen_method.predicts_hidden, weighting, effective_share)
    # 2. The two models, which must read the same tokens.
    folders = local_folder(source), local_folder(target)
    if not same_vocabulary(*folders):
        raise TokenizerMismatch(f"{source} and {target} have different tokenizers; a map needs the same token ids")
    models = load_model(folders[0], device, dtype), load_model(folders[1], device, dtype)
    cards = _card(str(source), folders[0], models[0]), _card(str(target), folders[1], models[1])
    if tokens is not None:
        check_enough(tokens, chosen_method, (cards[0].geometry, cards[1].geometry), layers, reading)
    ropes = Rope.of(models[0]), Rope.of(models[1])
    projected_by = projections(models[1]) if reading.hidden else None
    loaded = {} if dtype == "float32" else {"dtype": dtype}  # bundles and checkpoints from before say nothing of it
    # 3. Statistics of the documents.
    began = time.perf_counter()
    file = None
    if checkpoint:
        pair = {"source": cards[0].fingerprint, "target": cards[1].fingerprint}
        file = Checkpoint(checkpoint, {**pair, **asdict(reading), **loaded}, checkpoint_s, keep)
    collected = collect(models, ropes, documents, reading, max_tokens=tokens, progress=progress, checkpoint=file)
    # 4. A choice of source layers and weights for every target layer.
    judge = AttentionJudge(models, ropes, collected.sample, head) if choose == "attention" else None
    chooser = Chooser(chosen_method, choose, judge, projected_by)
    outputs, weights = _solve(chooser, chosen_method.name, collected, layers, precision, choosing, say)
    if say:
        beside_s = time.perf_counter() - began - collected.reading_s
        say(f"the models read for {collected.reading_s:.1f} s; all else took {beside_s:.1f} s")
    # 5. The bundle.
    manifest = Manifest(
        source=cards[0],
        target=cards[1],
        method=method,
        options={
            "layers": layers,
            "joint": joint,
            "choose": choose,
            "weighting": weighting,
            **({"effective_share": effective_share} if weighting != "uniform" else {}),
            **loaded,
            **options,
        },
        layers=tuple(
            LayerSpec(keys=outputs["keys", i], values=outputs["values", i]) for i in range(cards[1].num_layers)
        ),
        precision=precision,
        calibration=Calibration(
            name=data,
            digest=collected.digest,
            num_documents=collected.num_documents,
            num_tokens=collected.num_tokens,
            head=head,
        ),
        gate=gate,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        tool_version=tool_version(),
        licence=licence,
    )
    weights |= {probe_name(role): rope.probe() for role, rope in zip(("source", "target"), ropes, strict=True)}
    if precision in MEASURED:
        weights = mixed(manifest, weights, models, collected.sample)
    return seal(manifest, weights, device)


def tool_version() -> str:
    """The installed version of kvrelay, `0` where it runs uninstalled."""
    try:
        return version("kvrelay")
    except PackageNotFoundError:
        return "0"


def _solve(
    chooser: Chooser,
    method: str,
    collected: CalibrationStatistics,
    layers: Layers,
    precision: Precision,
    choosing: Progress | None,
    say: Callable[[str], None] | None,
) -> tuple[dict[Target, OutputSpec], dict[str, Tensor]]:
    outputs = {target: _copied(target, layer) for target, layer in collected.copies.items()}
    weights: dict[str, Tensor] = {}
    done, total = 0, sum(len(group.targets) for group in collected.groups)
    for group in collected.groups:
        if say:
            say(f"choosing source layers for {len(group.targets)} outputs from {' and '.join(group.kinds)}")
        for wanted, choice in zip(group.targets, chooser.choices(group, layers), strict=True):
            done += 1
            if choosing:
                choosing(done, total)
            for (kind, layer), solution in chooser.outputs(wanted, choice.solution).items():
                if (kind, layer) not in collected.copies:
                    outputs[kind, layer] = _described(method, choice, solution)
                    weights |= stored(layer, kind, solution, precision)
    return outputs, weights


def _described(method: str, choice: Choice, solution: methods.Solution) -> OutputSpec:
    return OutputSpec(
        method=method,
        key_layers=tuple(layer for kind, layer in choice.blocks if kind == "keys"),
        value_layers=tuple(layer for kind, layer in choice.blocks if kind == "values"),
        ridge=solution.ridge,
        r2=round(choice.r2, 6),
        **solution.structure(),
    )


def _copied(target: Target, layer: int) -> OutputSpec:
    if target[0] == "keys":
        return OutputSpec(method=COPY, key_layers=(layer,))
    return OutputSpec(method=COPY, value_layers=(layer,))


def _card(name: str, folder: Path, model: Any) -> ModelCard:
    geometry = geometry_of(model.config)
    return ModelCard(
        name=name if not Path(name).exists() else folder.resolve().name,
        revision=folder.name if folder.parent.name == "snapshots" else None,
        fingerprint=fingerprint(folder),
        tokenizer_digest=tokenizer_digest(folder),
        num_layers=geometry.num_layers,
        num_kv_heads=geometry.num_kv_heads,
        head_dim=geometry.head_dim,
        config=config_dict(model),
    )


def check_settings(
    method: methods.Method,
    layers: Layers,
    joint: bool,
    choose: str,
    weighting: str,
    effective_share: float,
    head: int,
    tokens: int | None,
    precision: str,
) -> None:
    """Raise `MapperError` for settings of `fit` that can't work, whatever the models."""
    check_way(choose)
    check_weighting(weighting, effective_share)
    if tokens is not None and tokens < 1:
        raise MapperError(f"tokens is {tokens}; allowed: 1 and more")
    if joint and method.max_layers:
        raise MapperError(f"{method.name} maps keys from keys and values from values; it can't be joint")
    if layers != AUTO and (isinstance(layers, str) or layers < 1):
        raise MapperError(f"layers is {layers}; allowed: 1 and more, {AUTO}")
    if head < 0:
        raise MapperError(f"head is {head}; allowed: 0 and more")
    if precision not in get_args(Precision):
        raise MapperError(f"unknown precision {precision!r}; allowed: {', '.join(get_args(Precision))}")


def check_enough(
    num_tokens: float,
    method: methods.Method,
    geometries: tuple[KVGeometry, KVGeometry],
    layers: Layers,
    reading: Reading,
) -> None:
    """Raise `CalibrationTooSmall` if a map between caches of these geometries can't be fitted by so many tokens."""
    source, target = geometries
    most = 1 if isinstance(layers, str) else min(layers, source.num_layers, method.max_layers or layers)
    features = most * source.width * len(reading.together[0])
    layout = methods.Layout(source.num_kv_heads, source.head_dim, target.num_kv_heads, target.head_dim)
    needed = method.tokens_needed(features, layout)
    if num_tokens < needed:
        raise CalibrationTooSmall(
            f"{num_tokens:.0f} tokens for {features} features; at least {needed} are needed beside what is held out "
            f"(more data, or fewer source layers)"
        )
