"""What two bundles have in common and what not, as rows for a table."""

from __future__ import annotations

from typing import Any

import torch

from mappers.manifest import KINDS, Evaluation, Kind, OutputSpec
from mappers.mapper import Mapper
from mappers.weights import WholeOutput

Row = tuple[str, str, str]  # what, the first's, the second's


def difference(first: Mapper, second: Mapper) -> list[Row]:
    """Rows of what differs; outputs by layer where both bundles lie between models of the same shapes."""
    ours, theirs = _described(first), _described(second)
    rows = [(name, ours[name], theirs[name]) for name in ours if ours[name] != theirs[name]]
    if _shapes(first) == _shapes(second):
        for layer in range(first.manifest.target.num_layers):
            rows += [row for kind in KINDS if (row := _output(first, second, layer, kind))]
    return rows


def _described(mapper: Mapper) -> dict[str, str]:
    manifest = mapper.manifest
    calibration = manifest.calibration
    return {
        "bundle": manifest.bundle_id,
        "source": f"{manifest.source.name} {manifest.source.fingerprint[:12]}",
        "target": f"{manifest.target.name} {manifest.target.fingerprint[:12]}",
        "method": manifest.method,
        "options": ", ".join(f"{name} {value}" for name, value in sorted(manifest.options.items())) or "none",
        "precision": manifest.precision,
        "calibration": f"{calibration.name}, {calibration.num_tokens} tokens, {calibration.digest[:12]}",
        "bytes": str(mapper.weight_bytes),
        "evaluation": _judged(manifest.evaluation),
    }


def _judged(evaluation: Evaluation | None) -> str:
    score = evaluation.arm("hybrid") if evaluation else None
    if score is None:
        return "none"
    return f"hybrid ppl ratio {score.ppl_ratio:.3f} ({score.ppl_low:.3f}-{score.ppl_high:.3f}), top-1 {score.top1:.3f}"


def _shapes(mapper: Mapper) -> Any:
    return mapper.manifest.source.geometry, mapper.manifest.target.geometry


def _output(first: Mapper, second: Mapper, layer: int, kind: Kind) -> Row | None:
    specs = [mapper.manifest.layers[layer].of(kind) for mapper in (first, second)]
    wholes = [WholeOutput.of(mapper, layer, kind).multiplied for mapper in (first, second)]
    blocks = sorted({block for whole in wholes for block in whole.blocks})
    ours, theirs = (torch.cat([whole.rows(block) for block in blocks]) for whole in wholes)
    apart = float((ours - theirs).norm() / theirs.norm().clamp_min(1e-30))
    if specs[0] == specs[1] and apart == 0 and torch.equal(wholes[0].bias, wholes[1].bias):
        return None
    return f"layer {layer} {kind}", described(specs[0]), f"{described(specs[1])}; weights differ by {apart:.1%}"


def described(spec: OutputSpec) -> str:
    """One output in a few words."""
    layers = [f"k{i}" for i in spec.key_layers] + [f"v{i}" for i in spec.value_layers]
    form = f" rank {spec.rank}" if spec.rank else " by heads" if spec.heads else ""
    return f"{spec.method}{form} of {','.join(layers)}" + (f" (R² {spec.r2:.3f})" if spec.r2 is not None else "")
