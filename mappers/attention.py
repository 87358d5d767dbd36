"""Observes the attention of a live model through transformers' registry of attention functions.

Works for every model that attends through the registry, whatever its projections look like. Three uses:

    AttentionReceived   weights of calibration tokens: how much each one is attended to
    AttentionJudge      error of a mapped layer, measured on the target's attention, to choose source layers by
    AttentionCosines    evaluation: how far attention moves when a mapped cache replaces the native one
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mappers.cache import KVCache, rows_of
from mappers.errors import CalibrationTooSmall, UnsupportedModel
from mappers.manifest import Block, Target
from mappers.methods import Solution
from mappers.models import prefill
from mappers.rope import Rope

WATCHED = "kvrelay_watched"  # name of our attention function in the registry
PLAIN = "sdpa"
NEAR = 64  # native tokens just before each query, as when the cache is served


@dataclass(frozen=True)
class AttentionCall:
    """Inputs of one layer's attention over new tokens.

    `queries` are post-RoPE (query heads, new, D); `keys` and `values` (H, all, D) are of all tokens so far; `visible`
    (new, all) is the mask.
    """

    layer: int
    queries: Tensor
    keys: Tensor
    values: Tensor
    visible: Tensor
    scale: float

    def weights(self) -> Tensor:
        """Attention weights (query heads, new, all)."""
        return _softmax(attention_scores(self.queries, self.keys, self.scale), self.visible)


Listener = Callable[[AttentionCall], None]
Attend = Callable[..., Any]  # transformers' signature: (layer module, query, key, value, mask, **options)


def attention_scores(queries: Tensor, keys: Tensor, scale: float) -> Tensor:
    """Return scaled scores (query heads, new, all), each group of query heads over its own keys."""
    grouped = queries.float().reshape(len(keys), -1, *queries.shape[1:])  # (H, group, new, D)
    scores = scale * (grouped @ keys.float().unsqueeze(1).transpose(-1, -2))
    return scores.flatten(0, 1)


def attention_outputs(weights: Tensor, values: Tensor) -> Tensor:
    """Apply attention weights (query heads, new, all) to values (H, all, D), giving (query heads, new, D)."""
    grouped = weights.reshape(len(values), -1, *weights.shape[1:])  # (H, group, new, all)
    outputs = grouped @ values.float().unsqueeze(1)
    return outputs.flatten(0, 1)


# Hooks into a live model.


@contextmanager
def watch_attention(model: Any, listener: Listener) -> Iterator[None]:
    """Call `listener` for every layer of `model` in the block, without changing what the model computes.

    Raises `UnsupportedModel` for a model that does not attend through the registry.
    """

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> Any:
        scale = options.get("scaling") or query.shape[-1] ** -0.5
        visible = _visible(attention_mask, query.shape[2], key.shape[2], query.device)
        listener(AttentionCall(module.layer_idx, query[0], key[0], value[0], visible, scale))
        return ALL_ATTENTION_FUNCTIONS[PLAIN](module, query, key, value, attention_mask, **options)

    with replace_attention(model, attend, PLAIN):
        yield


@contextmanager
def replace_attention(model: Any, attend: Attend, masks: str) -> Iterator[None]:
    """Let `model` attend by `attend` in the block, with the masks of the implementation named `masks`.

    One model at a time. Raises `UnsupportedModel` for a model that does not attend through the registry.
    """
    before = model.config._attn_implementation
    ALL_ATTENTION_FUNCTIONS[WATCHED] = attend
    # Without a registered mask function transformers makes no mask, and a second chunk would not be causal.
    AttentionMaskInterface.register(WATCHED, ALL_MASK_ATTENTION_FUNCTIONS[masks])
    try:
        model.set_attn_implementation(WATCHED)
        if model.config._attn_implementation != WATCHED:
            raise UnsupportedModel(
                f"{type(model).__name__} does not use transformers' attention registry, which attention weighting, "
                "choosing by attention and comparing attention outputs require"
            )
        yield
    finally:
        model.set_attn_implementation(before)
        del ALL_ATTENTION_FUNCTIONS[WATCHED]


def _visible(mask: Tensor | None, num_new: int, num_all: int, device: torch.device) -> Tensor:
    """Return (new, all): the mask that transformers made, or a causal one if it made none."""
    if mask is not None:
        return mask[0, 0, :, :num_all]
    return torch.ones(num_new, num_all, dtype=torch.bool, device=device).tril(num_all - num_new)


# Weights of calibration tokens.


class AttentionReceived:
    """Listener that sums up the attention each token of one document receives from later tokens.

    A query's attention is counted relative to uniform attention over all that it sees, so that a token's weight does
    not depend on its position. A mapping error in a token that is attended to more does more harm.
    """

    def __init__(self, num_tokens: int, device: torch.device | str = "cpu"):
        self._received = torch.zeros(num_tokens, dtype=torch.float64, device=device)
        self._queries = torch.zeros_like(self._received)

    def __call__(self, call: AttentionCall) -> None:
        num_new, num_all = call.visible.shape
        own = torch.ones_like(call.visible).tril(num_all - num_new).triu(num_all - num_new)
        others = call.visible & ~own
        num_visible = call.visible.sum(1, keepdim=True)
        received = call.weights().mean(0) * num_visible * others  # (new, all)
        self._received[:num_all] += received.sum(0)
        self._queries[:num_all] += others.sum(0)

    def mean(self) -> Tensor:
        """Return (T,): attention received per query. 1 is uniform attention, and the value for tokens without a
        query."""
        has_queries = self._queries > 0
        return torch.where(has_queries, self._received / self._queries.clamp_min(1), torch.ones_like(self._received))


def shrink_weights(weights: Tensor, effective_share: float) -> Tensor:
    """Scale weights (n,) to mean 1 and move them towards 1 until the effective sample size is `effective_share * n`.

    Weights of mean 1 and variance v have the effective share 1 / (1 + v) (Kish). Keeps few tokens from dominating.
    """
    scaled = weights / weights.mean()
    deviation = float((scaled - 1).square().mean().sqrt())
    allowed = (1 / effective_share - 1) ** 0.5
    return scaled if deviation <= allowed else 1 + (scaled - 1) * (allowed / deviation)


# Error of one mapped layer.


@dataclass(frozen=True)
class _Sample:
    """One document: the source's cache without RoPE, and the attention calls of the target by layer."""

    source: KVCache
    calls: dict[int, AttentionCall]


class AttentionJudge:
    """Measures a map of one layer's keys or values by the change of the target's attention on held-out documents.

    As when served, each query sees the first tokens and those just before it native, and the tokens between mapped:

        0      head                 query - NEAR          query
        |native|       mapped        |       native         |

    R² measures how well keys are predicted, this how much it matters: errors along directions that no query uses do
    not count. Raises `CalibrationTooSmall` if all documents are too short.
    """

    @torch.no_grad()
    def __init__(self, models: tuple[Any, Any], ropes: tuple[Rope, Rope], sample: Sequence[list[int]], head: int):
        self._rope, self._head = ropes[1], head
        self._samples = []
        for ids in sample:
            if len(ids) > head + NEAR:
                calls: dict[int, AttentionCall] = {}
                with watch_attention(models[1], lambda call, calls=calls: calls.__setitem__(call.layer, call)):  # type: ignore[misc]
                    prefill(models[1], ids)
                self._samples.append(_Sample(ropes[0].strip_cache(prefill(models[0], ids)), calls))
        if not self._samples:
            raise CalibrationTooSmall(
                f"no held-out document of more than {head + NEAR} tokens to measure attention on; allowed: longer "
                f"documents, or another way to choose"
            )

    @torch.no_grad()
    def error(self, blocks: Sequence[Block], outputs: Mapping[Target, Solution]) -> float:
        """Return 1 - cosine between attention outputs over mapped and native states.

        Mean over queries, heads and `outputs`, each of which is mapped alone from the features of `blocks`.
        """
        errors = [
            _cosine_errors(sample.calls[target[1]], self._map(sample, blocks, target, solution), target, self._head)
            for sample in self._samples
            for target, solution in outputs.items()
        ]
        return float(torch.cat(errors).mean())

    def _map(self, sample: _Sample, blocks: Sequence[Block], target: Target, solution: Solution) -> Tensor:
        """Return the target's mapped keys with RoPE, or its values, (H, T, D)."""
        features = torch.cat([rows_of(sample.source.of(kind)[layer]) for kind, layer in blocks], dim=1)
        rows = (features.double() @ solution.weight + solution.bias).float()
        heads, num_tokens, dim = sample.calls[target[1]].keys.shape
        mapped = rows.view(num_tokens, heads, dim).transpose(0, 1)
        if target[0] == "keys":
            mapped = self._rope.apply(mapped, torch.arange(num_tokens, device=mapped.device), target[1])
        return mapped


def _cosine_errors(native: AttentionCall, mapped: Tensor, target: Target, head: int) -> Tensor:
    """Return 1 - cosine for every query with mapped tokens in view, flattened over heads."""
    first = head + NEAR
    queries, visible = native.queries[:, first:], native.visible[first:]
    far = torch.ones_like(visible).tril(first - NEAR)  # more than NEAR before the query
    far[:, :head] = False
    scores = attention_scores(queries, native.keys, native.scale)
    exact = attention_outputs(_softmax(scores, visible), native.values)
    if target[0] == "keys":
        mapped_scores = torch.where(far, attention_scores(queries, mapped, native.scale), scores)
        outputs = attention_outputs(_softmax(mapped_scores, visible), native.values)
    else:
        weights = _softmax(scores, visible)
        outputs = attention_outputs(weights * far, mapped) + attention_outputs(weights * ~far, native.values)
    return 1 - torch.cosine_similarity(outputs, exact, dim=-1).flatten()


def _softmax(scores: Tensor, visible: Tensor) -> Tensor:
    return scores.masked_fill(~visible, -torch.inf).softmax(-1)


# Comparison of two caches.


class AttentionCosines:
    """Cosine between attention outputs over the native cache and over one partly replaced by `stand_in`."""

    def __init__(self, stand_in: KVCache):
        self._stand_in = stand_in
        self._sums: dict[int, Tensor] = {}  # by layer, (heads,)
        self._tokens: dict[int, int] = {}

    @property
    def mean(self) -> Tensor:
        """Mean over tokens, (layers, heads)."""
        return torch.stack([self._sums[layer] / self._tokens[layer] for layer in sorted(self._sums)])

    def replace(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return a layer's keys and values (1, H, T, D) with the tokens of the stand-in replaced."""
        covered = slice(self._stand_in.start, self._stand_in.start + self._stand_in.num_tokens)
        keys, values = keys.clone(), values.clone()
        keys[0, :, covered], values[0, :, covered] = self._stand_in.keys[layer], self._stand_in.values[layer]
        return keys, values

    def add(self, layer: int, native: Tensor, other: Tensor) -> None:
        """Add attention outputs (1, T, heads, D) of a layer."""
        cosines = torch.cosine_similarity(native[0].float(), other[0].float(), dim=-1)  # (T, heads)
        self._sums[layer] = self._sums.get(layer, torch.zeros(())) + cosines.sum(0).cpu()
        self._tokens[layer] = self._tokens.get(layer, 0) + len(cosines)


@contextmanager
def compare_attention(model: Any, stand_ins: Sequence[KVCache]) -> Iterator[list[AttentionCosines]]:
    """Compute every attention of `model` in the block over each stand-in as well, and compare the outputs.

    The model's own results do not change, and all queries are its native ones. One model at a time.
    """
    comparisons = [AttentionCosines(stand_in) for stand_in in stand_ins]
    name = model.config._attn_implementation
    if name not in ALL_ATTENTION_FUNCTIONS:
        allowed = ", ".join(sorted(ALL_ATTENTION_FUNCTIONS))
        raise UnsupportedModel(f"attention implementation {name!r} cannot be watched; allowed: {allowed}")
    plain: Attend = ALL_ATTENTION_FUNCTIONS[name]

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any) -> Any:
        output = plain(module, query, key, value, *rest, **options)
        for cosines in comparisons:
            other = plain(module, query, *cosines.replace(module.layer_idx, key, value), *rest, **options)
            cosines.add(module.layer_idx, output[0], other[0])
        return output

    with replace_attention(model, attend, masks=name):
        yield comparisons
