"""Composes two maps into one: A -> B and B -> C give A -> C, without a fit.

Linear maps compose. RoPE cancels: the second map strips what the first applies.
"""

from __future__ import annotations

import datetime
import hashlib

import torch
from torch import Tensor

from mappers.bundle import seal
from mappers.errors import FingerprintMismatch, MapperError
from mappers.manifest import (
    COPY,
    KINDS,
    LICENCE,
    Calibration,
    Kind,
    LayerSpec,
    Manifest,
    OutputSpec,
    Precision,
    probe_name,
    tool_version,
    weight_name,
)
from mappers.mapper import Mapper
from mappers.methods import Solution
from mappers.methods.base import FactoredSolution
from mappers.rope import TOLERANCE
from mappers.weights import WholeOutput, tensors_of

COMPOSED = "composed"


def compose(first: Mapper, second: Mapper) -> Mapper:
    """Return the map from the source of `first` to the target of `second`, equal to applying one after the other.

    Raises `FingerprintMismatch` unless the target of `first` is the source of `second`, and `MapperError` if `first`
    copies keys between models with different RoPE. The result has no evaluation.
    """
    _check(first, second)
    precisions = {first.manifest.precision, second.manifest.precision}
    precision: Precision = "float16" if precisions == {"float16"} else "float32"
    weights: dict[str, Tensor] = {
        probe_name("source"): first.weights[probe_name("source")],
        probe_name("target"): second.weights[probe_name("target")],
    }
    layers = []
    for layer in range(second.manifest.target.num_layers):
        specs: dict[Kind, OutputSpec] = {}
        for kind in KINDS:
            specs[kind], tensors = _output(first, second, layer, kind, precision)
            weights |= tensors
        layers.append(LayerSpec(keys=specs["keys"], values=specs["values"]))
    return seal(_manifest(first, second, tuple(layers), precision), weights, str(first.device))


def _output(
    first: Mapper, second: Mapper, layer: int, kind: Kind, precision: Precision
) -> tuple[OutputSpec, dict[str, Tensor]]:
    """Return one output's spec and its tensors by name."""
    outer_spec = second.manifest.layers[layer].of(kind)
    outer = WholeOutput.of(second, layer, kind)
    inner_specs = {block: first.manifest.layers[block[1]].of(block[0]) for block in outer.blocks}
    # 1. A copy of an output keeps the output's stored form.
    if outer_spec.method == COPY:
        (copied,) = outer.blocks
        parts = ((part, weight_name(copied[1], kind, part)) for part in ("weight", "up", "bias"))
        return inner_specs[copied], {
            weight_name(layer, kind, part): first.weights[name] for part, name in parts if name in first.weights
        }
    # 2. Every block of the second map is an output of the first.
    outputs = {block: WholeOutput.of(first, block[1], block[0]).multiplied for block in outer.blocks}
    blocks = tuple(sorted({block for spec in inner_specs.values() for block in spec.blocks}))
    weight = torch.cat([_sum([outputs[b].rows(a) @ outer.rows(b) for b in outer.blocks]) for a in blocks])
    constant = _sum([outputs[b].bias @ outer.rows(b) for b in outer.blocks])
    # 3. The result is factored if the second map is.
    if outer.up is None:
        solution = Solution(weight, constant + outer.bias)
    else:
        bias = constant @ outer.up + outer.bias
        solution = FactoredSolution(weight @ outer.up, bias, down=weight, up=outer.up)
    spec = OutputSpec(
        method=COMPOSED,
        key_layers=tuple(i for name, i in blocks if name == "keys"),
        value_layers=tuple(i for name, i in blocks if name == "values"),
        **solution.structure(),
    )
    return spec, tensors_of(layer, kind, solution, precision)


def _sum(parts: list[Tensor]) -> Tensor:
    return torch.stack(parts).sum(0)


def _check(first: Mapper, second: Mapper) -> None:
    middle, expected = first.manifest.target, second.manifest.source
    if middle.fingerprint != expected.fingerprint:
        raise FingerprintMismatch(
            f"bundle {first.bundle_id} maps to {middle.name} ({middle.fingerprint[:12]}…), bundle {second.bundle_id} "
            f"maps from {expected.name} ({expected.fingerprint[:12]}…); allowed: A to B, then B to C"
        )
    positions = first.target_rope.probe_positions
    for layer, spec in enumerate(first.manifest.layers):
        if spec.keys.method != COPY:
            continue
        source = torch.cat(first.source_rope.rows(positions, spec.keys.key_layers[0]))
        target = torch.cat(first.target_rope.rows(positions, layer))
        if source.shape != target.shape or not torch.allclose(source, target, atol=TOLERANCE):
            raise MapperError(
                f"bundle {first.bundle_id} copies the keys of layer {layer} between models with different RoPE; "
                f"allowed: a bundle fitted with copies=False (kvrelay fit --no-copies)"
            )


def _manifest(first: Mapper, second: Mapper, layers: tuple[LayerSpec, ...], precision: Precision) -> Manifest:
    parts = (first.manifest.calibration, second.manifest.calibration)
    return Manifest(
        source=first.manifest.source,
        target=second.manifest.target,
        method=COMPOSED,
        options={"first": first.bundle_id, "second": second.bundle_id},
        layers=layers,
        precision=precision,
        calibration=Calibration(
            name="; then ".join(part.name for part in parts),
            digest=hashlib.sha256("".join(part.digest for part in parts).encode()).hexdigest(),
            num_documents=min(part.num_documents for part in parts),
            num_tokens=min(part.num_tokens for part in parts),
            head=max(part.head for part in parts),
        ),
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        tool_version=tool_version(),
        licence=LICENCE,
    )
