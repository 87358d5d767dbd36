"""Fits a mapper: both models prefill the same documents, then each target layer is solved in closed form.

documents ──collect──► statistics ──choose──► source layers and weights ──► bundle
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from mappers.attention import AttentionJudge
from mappers.bundle import seal
from mappers.cache import KVGeometry
from mappers.checkpoint import Checkpoint
from mappers.choose import Choice, Chooser
from mappers.collect import CalibrationStatistics, Progress, collect
from mappers.errors import CalibrationTooSmall, TokenizerMismatch
from mappers.fingerprint import fingerprint, same_vocabulary, tokenizer_digest
from mappers.manifest import (
    COPY,
    MEASURED,
    Calibration,
    LayerSpec,
    Manifest,
    ModelCard,
    OutputSpec,
    Target,
    probe_name,
    tool_version,
)
from mappers.mapper import Mapper
from mappers.methods import Layout, Solution
from mappers.methods.hidden import projections
from mappers.model_config import geometry_of
from mappers.models import config_dict, load_model, local_folder
from mappers.rope import Rope
from mappers.settings import FitSettings
from mappers.weights import halve_where_safe, tensors_of

DEFAULTS = FitSettings()


def fit(
    source: str | Path,
    target: str | Path,
    documents: Iterable[Sequence[int]],
    settings: FitSettings = DEFAULTS,
    *,
    progress: Progress | None = None,
    choosing: Progress | None = None,
    say: Callable[[str], None] | None = None,
) -> Mapper:
    """Fit a map from the cache of model `source` to that of `target`, given as local folders or hub names.

    `documents` are token ids; memory does not grow with their number. Every eighth document is held out to choose
    layers and penalties by. Layers that both models share are found and copied, unless `settings.copies` is false.
    `progress` receives the tokens prefilled so far, `choosing` the outputs fitted so far, `say` log lines.

    A fit resumes from a checkpoint of the same models, documents and features, also with another method or more
    tokens. The caller removes it. Raises subclasses of `MapperError`, see `mappers.errors`.
    """
    # 1. Two models with the same token ids.
    folders = local_folder(source), local_folder(target)
    if not same_vocabulary(*folders):
        raise TokenizerMismatch(f"{source} and {target} have different tokenizers; a map needs the same token ids")
    models = (
        load_model(folders[0], settings.device, settings.dtype),
        load_model(folders[1], settings.device, settings.dtype),
    )
    cards = _card(str(source), folders[0], models[0]), _card(str(target), folders[1], models[1])
    if settings.tokens is not None:
        check_enough(settings.tokens, settings, cards[0].geometry, cards[1].geometry)
    ropes = Rope.of(models[0]), Rope.of(models[1])
    projected_by = projections(models[1]) if settings.hidden else None
    # 2. Statistics of the documents.
    began = time.perf_counter()
    checkpoint = None
    if settings.checkpoint:
        key = {"source": cards[0].fingerprint, "target": cards[1].fingerprint, **settings.checkpoint_key()}
        checkpoint = Checkpoint(settings.checkpoint, key, settings.checkpoint_s, settings.keep_checkpoint)
    statistics = collect(models, ropes, documents, settings, progress=progress, checkpoint=checkpoint)
    # 3. Source layers and weights for every target layer.
    judge = AttentionJudge(models, ropes, statistics.sample, settings.head) if settings.choose == "attention" else None
    chooser = Chooser(settings, judge, projected_by)
    outputs, weights = _solve(chooser, settings, statistics, choosing, say)
    if say:
        solve_s = time.perf_counter() - began - statistics.prefill_s
        say(f"prefill took {statistics.prefill_s:.1f} s; everything else took {solve_s:.1f} s")
    # 4. The bundle.
    manifest = Manifest(
        source=cards[0],
        target=cards[1],
        method=settings.method,
        options=settings.manifest_options(),
        layers=tuple(
            LayerSpec(keys=outputs["keys", i], values=outputs["values", i]) for i in range(cards[1].num_layers)
        ),
        precision=settings.precision,
        calibration=Calibration(
            name=settings.data,
            digest=statistics.digest,
            num_documents=statistics.num_documents,
            num_tokens=statistics.num_tokens,
            head=settings.head,
        ),
        gate=settings.gate,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        tool_version=tool_version(),
        licence=settings.licence,
    )
    weights |= {probe_name(role): rope.probe() for role, rope in zip(("source", "target"), ropes, strict=True)}
    if settings.precision in MEASURED:
        weights = halve_where_safe(manifest, weights, models, statistics.sample)
    return seal(manifest, weights, settings.device)


def _solve(
    chooser: Chooser,
    settings: FitSettings,
    statistics: CalibrationStatistics,
    choosing: Progress | None,
    say: Callable[[str], None] | None,
) -> tuple[dict[Target, OutputSpec], dict[str, Tensor]]:
    """Return the spec of every output, and the tensors of the bundle by name."""
    outputs = {
        (kind, i): OutputSpec(method=COPY, key_layers=(layer,))
        if kind == "keys"
        else OutputSpec(method=COPY, value_layers=(layer,))
        for (kind, i), layer in statistics.copies.items()
    }
    weights: dict[str, Tensor] = {}
    done, total = 0, sum(len(group.targets) for group in statistics.groups)
    for group in statistics.groups:
        if say:
            say(f"choosing source layers for {len(group.targets)} outputs from {' and '.join(group.kinds)}")
        for wanted, choice in zip(group.targets, chooser.choices(group), strict=True):
            done += 1
            if choosing:
                choosing(done, total)
            for (kind, layer), solution in chooser.outputs(wanted, choice.solution).items():
                if (kind, layer) not in statistics.copies:
                    outputs[kind, layer] = _spec(settings.method, choice, solution)
                    weights |= tensors_of(layer, kind, solution, settings.precision)
    return outputs, weights


def _spec(method: str, choice: Choice, solution: Solution) -> OutputSpec:
    return OutputSpec(
        method=method,
        key_layers=tuple(layer for kind, layer in choice.blocks if kind == "keys"),
        value_layers=tuple(layer for kind, layer in choice.blocks if kind == "values"),
        ridge=solution.ridge,
        r2=round(choice.r2, 6),
        **solution.structure(),
    )


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


def check_enough(num_tokens: float, settings: FitSettings, source: KVGeometry, target: KVGeometry) -> None:
    """Raise `CalibrationTooSmall` if `num_tokens` tokens are too few to fit a map between these geometries."""
    layers = settings.max_layers(source.num_layers, auto=1)
    features = layers * source.width * len(settings.feature_kinds[0])
    needed = settings.mapping_method.tokens_needed(features, Layout.between(source, target))
    if num_tokens < needed:
        raise CalibrationTooSmall(
            f"{num_tokens:.0f} tokens for {features} features; at least {needed} are needed besides the held-out ones "
            f"(use more data or fewer source layers)"
        )
