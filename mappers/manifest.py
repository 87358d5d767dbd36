"""The bundle's `manifest.json` as frozen values: models, layers, calibration, evaluation and quality gate."""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field

from mappers.cache import Kind as Kind
from mappers.cache import KVGeometry

FORMAT_VERSION: Literal[1] = 1
COPY = "copy"
DEFAULT_MAX_PPL_RATIO = 1.25
DEFAULT_MIN_TOP1 = 0.80
DEFAULT_MIN_DOCUMENTS = 50
DEFAULT_LENGTHS = (384, 1024, 2048)
DEFAULT_HEAD, DEFAULT_TAIL, DEFAULT_SCORED = 4, 64, 128
LICENCE = "Fitted from the outputs of both models named here; the terms of both apply."
# Fields that do not affect the map. The bundle id ignores them, so a new evaluation or an identical refit keeps the id.
NOT_IDENTITY = frozenset({"digest", "evaluation", "report_sha256", "gate", "created", "tool_version"})

Block = tuple[Kind, int]  # keys or values of one source layer
Target = tuple[Kind, int]  # keys or values of one target layer
Precision = Literal["float16", "float32", "mixed", "bfloat16"]  # of the stored matrices
# Precisions that store half-precision matrices only where the measured loss is small.
MEASURED = {"mixed": torch.float16, "bfloat16": torch.bfloat16}
KINDS: tuple[Kind, Kind] = ("keys", "values")


def weight_name(layer: int, kind: Kind, part: str) -> str:
    return f"layers.{layer}.{kind}.{part}"


def probe_name(role: str) -> str:
    return f"rope.{role}.probe"


def tool_version() -> str:
    """Return the installed version of kvrelay, `0` if it is not installed."""
    try:
        return version("kvrelay")
    except PackageNotFoundError:
        return "0"


def _is_unset(value: Any) -> bool:
    """Exclude fields added after format version 1 when empty, so that older bundles keep their ids."""
    return not value


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelCard(Frozen):
    """One model of the pair. `config` is its Hugging Face config, from which its RoPE is rebuilt."""

    name: str
    revision: str | None = None
    fingerprint: str
    tokenizer_digest: str | None = None
    num_layers: int
    num_kv_heads: int
    head_dim: int
    config: dict[str, Any]

    @property
    def geometry(self) -> KVGeometry:
        return KVGeometry(self.num_layers, self.num_kv_heads, self.head_dim)


class OutputSpec(Frozen):
    """How one target layer's keys (or values) are computed.

    Method `copy` passes one source layer through and stores no weights. All others multiply the features of the key
    layers, then of the value layers, by a stored matrix. It has one of three forms: whole; two factors of `rank`; or,
    with `heads`, one small matrix per target head, applied to one source head of every block. `r2` is held-out R².
    """

    method: str
    key_layers: tuple[int, ...] = ()
    value_layers: tuple[int, ...] = ()
    rank: int | None = Field(default=None, exclude_if=_is_unset)
    heads: tuple[tuple[int, ...], ...] = Field(default=(), exclude_if=_is_unset)
    ridge: float | None = None
    r2: float | None = None

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Source blocks in the order of the matrix rows."""
        keys: tuple[Block, ...] = tuple(("keys", layer) for layer in self.key_layers)
        return keys + tuple(("values", layer) for layer in self.value_layers)


class LayerSpec(Frozen):
    keys: OutputSpec
    values: OutputSpec

    def of(self, kind: Kind) -> OutputSpec:
        return self.keys if kind == "keys" else self.values


class Calibration(Frozen):
    """The data of the fit. `digest` is SHA-256 over the token ids; `head` tokens of each document were skipped."""

    name: str
    digest: str
    num_documents: int
    num_tokens: int
    head: int


class ArmScore(Frozen):
    """Predictions of the target model over one kind of cache, compared with those over its native cache.

    `ppl_ratio` is exp(mean over documents of the difference in mean log-loss); `ppl_low` and `ppl_high` are its 95%
    bootstrap interval. `top1` is the share of positions with the same most likely token. `kl_*` are in nats.
    `documents` counts the scored documents, each at one or more prefix lengths.
    """

    arm: str
    ppl_ratio: float
    ppl_low: float
    ppl_high: float
    top1: float
    kl_mean: float
    kl_p95: float
    documents: int | None = None


class LengthScores(Frozen):
    length: int
    num_documents: int
    arms: tuple[ArmScore, ...]


class LayerCosine(Frozen):
    """Cosine between one target layer's attention outputs over the served cache and over the native one.

    The queries are native. `mean` is over heads and tokens, `min` is the worst head's mean.
    """

    layer: int
    mean: float
    min: float


class DistanceCosine(Frozen):
    """The same cosine, averaged over layers, with only the tokens at one distance before the native tail mapped.

    `distance` is a key of `mappers.protocol.SPANS`.
    """

    distance: str
    mean: float


class GreedyScore(Frozen):
    """Greedy generation over the served cache compared with that over the native one.

    `agreement` is the share of positions with equal tokens, `identical` the share of identical generations.
    """

    tokens: int
    generations: int
    agreement: float
    identical: float


class Evaluation(Frozen):
    """Result of the quality protocol: `arms` over all prefix lengths, `lengths` for each one."""

    data: str
    head: int
    tail: int
    scored: int
    tokens: int
    arms: tuple[ArmScore, ...]
    lengths: tuple[LengthScores, ...]
    attention: tuple[LayerCosine, ...] = ()
    by_distance: tuple[DistanceCosine, ...] = Field(default=(), exclude_if=_is_unset)
    greedy: GreedyScore | None = None

    def arm(self, name: str) -> ArmScore | None:
        return next((arm for arm in self.arms if arm.arm == name), None)


class QualityGate(Frozen):
    """Minimum quality a worker requires of a bundle.

    Bounds both the scores of the arm `hybrid` and the protocol behind them, so that an easier one does not pass.
    """

    max_ppl_ratio: float = DEFAULT_MAX_PPL_RATIO
    min_top1: float = DEFAULT_MIN_TOP1
    min_documents: int = DEFAULT_MIN_DOCUMENTS  # at each length
    lengths: tuple[int, ...] = DEFAULT_LENGTHS
    min_scored: int = DEFAULT_SCORED
    max_head: int = DEFAULT_HEAD
    max_tail: int = DEFAULT_TAIL

    def objection(self, evaluation: Evaluation | None) -> str | None:
        """Return why a bundle with this evaluation fails the gate, None if it passes."""
        score = evaluation.arm("hybrid") if evaluation else None
        # 1. The scores.
        if evaluation is None or score is None:
            return "it has no evaluation; run kvrelay eval with --write"
        if score.ppl_ratio > self.max_ppl_ratio:
            return f"perplexity ratio {score.ppl_ratio:.3f} is over the gate's {self.max_ppl_ratio}"
        if score.top1 < self.min_top1:
            return f"top-1 agreement {score.top1:.3f} is below the gate's {self.min_top1}"
        # 2. The protocol: no shorter prefixes, fewer documents or more native tokens than the gate allows.
        documents = {at.length: at.num_documents for at in evaluation.lengths}
        for length in self.lengths:
            if documents.get(length, 0) < self.min_documents:
                return (
                    f"evaluated on {documents.get(length, 0)} documents at prefix length {length}; the gate requires "
                    f"{self.min_documents}"
                )
        if self.lengths and min(documents) < min(self.lengths):
            return f"evaluated at prefix length {min(documents)}; the gate requires at least {min(self.lengths)}"
        if evaluation.scored < self.min_scored:
            return f"evaluated on {evaluation.scored} tokens after a prefix; the gate requires {self.min_scored}"
        if evaluation.head > self.max_head:
            return f"evaluated with head {evaluation.head}; the gate allows {self.max_head}"
        if evaluation.tail > self.max_tail:
            return f"evaluated with tail {evaluation.tail}; the gate allows {self.max_tail}"
        return None


class Manifest(Frozen):
    """Everything a bundle states about itself. `report_sha256` is the digest of its HTML report, empty without one."""

    format_version: Literal[1] = FORMAT_VERSION
    source: ModelCard
    target: ModelCard
    method: str
    options: dict[str, Any] = Field(default_factory=dict)
    layers: tuple[LayerSpec, ...]
    precision: Precision
    calibration: Calibration
    evaluation: Evaluation | None = None
    report_sha256: str = Field(default="", exclude_if=_is_unset)
    gate: QualityGate | None = None
    created: str
    tool_version: str
    licence: str
    weights_sha256: str = ""
    digest: str = ""

    @property
    def copied_layers(self) -> tuple[int, ...]:
        """Target layers whose keys and values are both copied from the source."""
        return tuple(i for i, spec in enumerate(self.layers) if spec.keys.method == spec.values.method == COPY)

    @property
    def copies(self) -> dict[int, int]:
        """Source layer of each target layer whose keys and values are copies of the same one."""
        sources = {i: (self.layers[i].keys.key_layers, self.layers[i].values.value_layers) for i in self.copied_layers}
        return {layer: keys[0] for layer, (keys, values) in sources.items() if keys == values}

    @property
    def bundle_id(self) -> str:
        return digest_of(self.model_dump(mode="json"), NOT_IDENTITY)[:16]


def digest_of(manifest: dict[str, Any], leave_out: frozenset[str] = frozenset({"digest"})) -> str:
    """Return SHA-256 over the manifest's canonical JSON. The manifest contains the digest of the weights."""
    kept = {name: value for name, value in manifest.items() if name not in leave_out}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
