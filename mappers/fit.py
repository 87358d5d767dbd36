"""Fits a mapper: two models read the same documents, and closed-form algebra does the rest."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from mappers import methods
from mappers.bundle import seal
from mappers.choose import choose_all
from mappers.collect import Collected, Progress, collect
from mappers.errors import CalibrationTooSmall, MapperError, TokenizerMismatch
from mappers.exact import Target
from mappers.fingerprint import fingerprint, tokenizer_digest, vocabulary_digest
from mappers.manifest import COPY, Calibration, Gate, LayerSpec, Manifest, ModelCard, OutputSpec
from mappers.mapper import Mapper, probe_name
from mappers.models import config_dict, geometry_of, load_model, local_folder
from mappers.plan import weight_name
from mappers.rope import Rope

DEFAULT_HEAD = 4
DEFAULT_LAYERS = 4
LICENCE = "Fitted from the outputs of both models named here; the terms of both apply."


def fit(
    source: str | Path,
    target: str | Path,
    documents: Iterable[Sequence[int]],
    *,
    method: str = "ridge",
    layers: int = DEFAULT_LAYERS,
    joint: bool = False,
    copies: bool = True,
    head: int = DEFAULT_HEAD,
    tokens: int | None = None,
    precision: Literal["float16", "float32"] = "float16",
    data: str = "unnamed",
    gate: Gate | None = None,
    licence: str = LICENCE,
    device: str = "cpu",
    progress: Progress | None = None,
    **options: Any,
) -> Mapper:
    """The map from the cache of model `source` to that of `target` (local folders or hub names).

    `documents` are token ids; memory does not grow with their number. Each target layer is computed from at most
    `layers` source layers, keys from keys and values from values, or both from both if `joint`; layers that the two
    models share are found and passed through, unless `copies` is false. `tokens` bounds how much is read, the first
    `head` tokens of a document are left out, `options` go to the method. Every eighth document is held out to choose
    by. Raises `MapperError`s: see `mappers.errors`.
    """
    # 1. Settings that can't work are refused before anything is loaded.
    chosen_method = methods.get(method, **options)
    _check_settings(layers, head, precision)
    # 2. The two models, which must read the same tokens.
    folders = local_folder(source), local_folder(target)
    vocabularies = {vocabulary_digest(folder) for folder in folders} - {None}
    if len(vocabularies) > 1:
        raise TokenizerMismatch(f"{source} and {target} have different tokenizers; a map needs the same token ids")
    models = load_model(folders[0], device), load_model(folders[1], device)
    cards = _card(str(source), folders[0], models[0]), _card(str(target), folders[1], models[1])
    _check_tokens(chosen_method, cards[0], min(layers, chosen_method.max_layers or layers), joint, tokens)
    ropes = Rope.of(models[0]), Rope.of(models[1])
    # 3. Statistics of the documents.
    collected = collect(
        models, ropes, documents, joint=joint, copies=copies, head=head, max_tokens=tokens, progress=progress
    )
    # 4. A choice of source layers and weights for every target layer.
    outputs, weights = _solve(chosen_method, collected, layers, getattr(torch, precision))
    # 5. The bundle.
    manifest = Manifest(
        source=cards[0],
        target=cards[1],
        method=method,
        options={"layers": layers, "joint": joint, **options},
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
    probes = {probe_name(role): rope.probe() for role, rope in zip(("source", "target"), ropes, strict=True)}
    return seal(manifest, {**weights, **probes}, device)


def tool_version() -> str:
    """The installed version of kvrelay, `0` where it runs uninstalled."""
    try:
        return version("kvrelay")
    except PackageNotFoundError:
        return "0"


def _solve(
    method: methods.Method, collected: Collected, max_layers: int, dtype: torch.dtype
) -> tuple[dict[Target, OutputSpec], dict[str, Tensor]]:
    outputs = {target: _copied(target, layer) for target, layer in collected.copies.items()}
    weights: dict[str, Tensor] = {}
    for group in collected.groups:
        for (kind, layer), choice in zip(group.targets, choose_all(method, group, max_layers), strict=True):
            outputs[kind, layer] = OutputSpec(
                method=method.name,
                key_layers=choice.layers if "keys" in group.kinds else (),
                value_layers=choice.layers if "values" in group.kinds else (),
                ridge=choice.solution.ridge,
                r2=round(choice.r2, 6),
            )
            weights[weight_name(layer, kind, "weight")] = _cast(choice.solution.weight, dtype)
            weights[weight_name(layer, kind, "bias")] = _cast(choice.solution.bias, torch.float32)
    return outputs, weights


def _copied(target: Target, layer: int) -> OutputSpec:
    if target[0] == "keys":
        return OutputSpec(method=COPY, key_layers=(layer,))
    return OutputSpec(method=COPY, value_layers=(layer,))


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    cast = tensor.to(dtype).cpu()
    if not cast.isfinite().all():
        raise MapperError(f"a weight of {float(tensor.abs().max()):.3g} is too large for {dtype}; allowed: float32")
    return cast


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


def _check_settings(layers: int, head: int, precision: str) -> None:
    if layers < 1:
        raise MapperError(f"layers is {layers}; allowed: 1 and more")
    if head < 0:
        raise MapperError(f"head is {head}; allowed: 0 and more")
    if precision not in ("float16", "float32"):
        raise MapperError(f"unknown precision {precision!r}; allowed: float16, float32")


def _check_tokens(method: methods.Method, source: ModelCard, layers: int, joint: bool, tokens: int | None) -> None:
    features = min(layers, source.num_layers) * source.geometry.width * (2 if joint else 1)
    needed = method.tokens_needed(features)
    if tokens is not None and tokens < needed:
        raise CalibrationTooSmall(f"{tokens} tokens for {features} features; at least {needed} are needed")
