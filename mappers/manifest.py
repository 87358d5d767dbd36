"""What a bundle says about itself: `manifest.json`, as frozen values."""

from __future__ import annotations

import hashlib
import json
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
# What does not change the map: a bundle keeps its id when it is evaluated again, or fitted again to the same weights.
NOT_IDENTITY = frozenset({"digest", "evaluation", "report_sha256", "gate", "created", "tool_version"})

Block = tuple[Kind, int]  # a source layer's keys, or its values
Target = tuple[Kind, int]  # a target layer's keys, or its values
Precision = Literal["float16", "float32", "mixed", "bfloat16"]  # of the matrices
MEASURED = {"mixed": torch.float16, "bfloat16": torch.bfloat16}  # halves where they are found to cost little
KINDS: tuple[Kind, Kind] = ("keys", "values")


def _is_unset(value: Any) -> bool:
    """Fields that came later are left out where they say nothing, so that a bundle from before keeps its id."""
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
    """Where one target layer's keys (or values) come from: source layers' keys, source layers' values, or both.

    Method `copy` passes one source layer through and stores no weights. Others store a matrix from the blocks of
    features (the key layers, then the value layers) to the layer: whole, or with a `rank` as two factors, or with
    `heads` by target head, from one source head of every block. `r2` is that on held-out documents.
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
        """What the output is computed from, in the order of its matrix's rows."""
        keys: tuple[Block, ...] = tuple(("keys", layer) for layer in self.key_layers)
        return keys + tuple(("values", layer) for layer in self.value_layers)


class LayerSpec(Frozen):
    keys: OutputSpec
    values: OutputSpec

    def of(self, kind: Kind) -> OutputSpec:
        return self.keys if kind == "keys" else self.values


class Calibration(Frozen):
    """What the map was fitted on. `digest` is SHA-256 over the token ids, `head` the tokens left out of each start."""

    name: str
    digest: str
    num_documents: int
    num_tokens: int
    head: int


class ArmScore(Frozen):
    """How the target model predicts on one kind of cache, against its own native one.

    `ppl_ratio` is the exponential of the mean over documents of the difference in mean log-loss, `ppl_low` and
    `ppl_high` its bootstrap 95% interval; `top1` the share of equal most likely tokens; `kl_*` in nats. `documents`
    tells how many were scored, each at one length or several.
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
    """Attention of one target layer over the served cache against that over its native one, its queries native.

    Cosine of a head's output: `mean` over heads and tokens, `min` that of the worst head.
    """

    layer: int
    mean: float
    min: float


class DistanceCosine(Frozen):
    """The same, mean over layers too, where only tokens at this distance before the native tail are mapped (a span of
    `mappers.protocol.SPANS`)."""

    distance: str
    mean: float


class GreedyScore(Frozen):
    """Free-running generation over the served cache against that over the native one, most likely token first.

    `agreement` is the share of equal tokens at equal places; `identical` that of generations without any difference.
    """

    tokens: int
    generations: int
    agreement: float
    identical: float


class Evaluation(Frozen):
    """Result of the fixed quality protocol: `arms` over all lengths, `lengths` for each alone."""

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
    """What a worker asks of a bundle's evaluation before it uses it: how good its arm `hybrid` is, and that this was
    found out by the quality protocol, not by an easier one."""

    max_ppl_ratio: float = DEFAULT_MAX_PPL_RATIO
    min_top1: float = DEFAULT_MIN_TOP1
    min_documents: int = DEFAULT_MIN_DOCUMENTS  # at each length
    lengths: tuple[int, ...] = DEFAULT_LENGTHS
    min_scored: int = DEFAULT_SCORED
    max_head: int = DEFAULT_HEAD
    max_tail: int = DEFAULT_TAIL

    def objection(self, evaluation: Evaluation | None) -> str | None:
        """What speaks against a bundle with this evaluation, None if nothing does."""
        score = evaluation.arm("hybrid") if evaluation else None
        if evaluation is None or score is None:
            return "it has no evaluation; run kvrelay eval with --write"
        if score.ppl_ratio > self.max_ppl_ratio:
            return f"perplexity ratio {score.ppl_ratio:.3f} is over the gate's {self.max_ppl_ratio}"
        if score.top1 < self.min_top1:
            return f"top-1 agreement {score.top1:.3f} is below the gate's {self.min_top1}"
        return self._shortcut(evaluation)

    def _shortcut(self, evaluation: Evaluation) -> str | None:
        """Where the evaluation made it easier for the bundle than the gate allows."""
        documents = {at.length: at.num_documents for at in evaluation.lengths}
        for length in self.lengths:
            if documents.get(length, 0) < self.min_documents:
                return (
                    f"judged on {documents.get(length, 0)} documents at prefix length {length}; the gate asks for "
                    f"{self.min_documents}"
                )
        if self.lengths and min(documents) < min(self.lengths):
            return f"judged at prefix length {min(documents)} too; the gate asks for {min(self.lengths)} and more"
        if evaluation.scored < self.min_scored:
            return f"judged on {evaluation.scored} tokens behind a prefix; the gate asks for {self.min_scored}"
        for what, found, most in (("head", evaluation.head, self.max_head), ("tail", evaluation.tail, self.max_tail)):
            if found > most:
                return f"judged with {what} {found}; the gate allows {most}"
        return None


class Manifest(Frozen):
    """`report_sha256` is that of the page that the evaluation can be looked at in, if one stands in the bundle."""

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
        """Target layers whose keys and values are the source's own."""
        return tuple(i for i, spec in enumerate(self.layers) if spec.keys.method == spec.values.method == COPY)

    @property
    def copies(self) -> dict[int, int]:
        """Those of them that are one source layer, keys and values, each with that layer."""
        sources = {i: (self.layers[i].keys.key_layers, self.layers[i].values.value_layers) for i in self.copied_layers}
        return {layer: keys[0] for layer, (keys, values) in sources.items() if keys == values}

    @property
    def bundle_id(self) -> str:
        return digest_of(self.model_dump(mode="json"), NOT_IDENTITY)[:16]


def digest_of(manifest: dict[str, Any], leave_out: frozenset[str] = frozenset({"digest"})) -> str:
    """SHA-256 over the canonical JSON of a manifest, which names the weights by their own digest."""
    kept = {name: value for name, value in manifest.items() if name not in leave_out}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def weight_name(layer: int, kind: Kind, part: str) -> str:
    return f"layers.{layer}.{kind}.{part}"


def probe_name(role: str) -> str:
    return f"rope.{role}.probe"
