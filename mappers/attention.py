"""What the attention of a live model does while it reads, heard through transformers' own register of attention
functions: any model that attends through it can be watched, whatever its projections look like."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mappers.cache import KVCache, rows_of
from mappers.errors import CalibrationTooSmall, MapperError, UnsupportedModel
from mappers.manifest import Block, Target
from mappers.methods import Solution
from mappers.models import read
from mappers.rope import Rope

WATCHED = "kvrelay_watched"
PLAIN = "sdpa"


@dataclass(frozen=True)
class AttentionCall:
    """One layer reading tokens: post-RoPE queries (query heads, new tokens, D); keys and values (H, tokens, D) of all
    tokens so far; which tokens each new one sees (new tokens, tokens)."""

    layer: int
    queries: Tensor
    keys: Tensor
    values: Tensor
    visible: Tensor
    scale: float

    def weights(self) -> Tensor:
        """Attention paid, (query heads, new tokens, tokens)."""
        return attention_weights(self.queries, self.keys, self.visible, self.scale)


Listener = Callable[[AttentionCall], None]
Attend = Callable[..., Any]  # as transformers calls it: (layer's module, query, key, value, mask, **options)


def attention_weights(queries: Tensor, keys: Tensor, visible: Tensor, scale: float) -> Tensor:
    """Softmax of the scaled scores, (query heads, new tokens, tokens)."""
    return scores_of(queries, keys, scale).masked_fill_(~visible, -torch.inf).softmax(-1)


def scores_of(queries: Tensor, keys: Tensor, scale: float) -> Tensor:
    """(query heads, new tokens, tokens): each group of query heads over its own keys."""
    grouped = queries.float().reshape(len(keys), -1, *queries.shape[1:])  # (H, group, new, D)
    scores = scale * (grouped @ keys.float().unsqueeze(1).transpose(-1, -2))
    return scores.flatten(0, 1)


def paid_out(weights: Tensor, values: Tensor) -> Tensor:
    """(query heads, new tokens, D): what attention `weights` (query heads, new tokens, tokens) bring of `values`."""
    grouped = weights.reshape(len(values), -1, *weights.shape[1:])  # (H, group, new, T)
    paid = grouped @ values.float().unsqueeze(1)
    return paid.flatten(0, 1)


@contextmanager
def watched(model: Any, listener: Listener) -> Iterator[None]:
    """While this lasts, `listener` hears every layer of `model` attend; what the model computes does not change.

    Raises `UnsupportedModel` for a model that does not attend through the register.
    """
    with attending_by(model, _heard_by(listener), PLAIN):
        yield


@contextmanager
def attending_by(model: Any, attend: Attend, masks: str) -> Iterator[None]:
    """While this lasts, `model` attends by `attend`, with masks as the implementation of that name has them.

    One model at a time. Raises `UnsupportedModel` for a model that does not attend through the register.
    """
    before = model.config._attn_implementation
    ALL_ATTENTION_FUNCTIONS[WATCHED] = attend
    # Masks are made only for names that are registered for all; without one, a second piece would not be causal.
    AttentionMaskInterface.register(WATCHED, ALL_MASK_ATTENTION_FUNCTIONS[masks])
    try:
        model.set_attn_implementation(WATCHED)
        if model.config._attn_implementation != WATCHED:
            raise UnsupportedModel(
                f"{type(model).__name__} does not tell what it attends to, which weighting and choosing by attention, "
                "and the comparison of attention outputs, need"
            )
        yield
    finally:
        model.set_attn_implementation(before)
        del ALL_ATTENTION_FUNCTIONS[WATCHED]


def _heard_by(listener: Listener) -> Attend:
    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> Any:
        scale = options.get("scaling") or query.shape[-1] ** -0.5
        visible = _visible(attention_mask, query.shape[2], key.shape[2], query.device)
        listener(AttentionCall(module.layer_idx, query[0], key[0], value[0], visible, scale))
        return ALL_ATTENTION_FUNCTIONS[PLAIN](module, query, key, value, attention_mask, **options)

    return attend


def _visible(mask: Tensor | None, num_new: int, num_all: int, device: torch.device) -> Tensor:
    """(new, all): the mask that transformers made, or where it needs none, each token and those before it."""
    if mask is not None:
        return mask[0, 0, :, :num_all]
    return torch.ones(num_new, num_all, dtype=torch.bool, device=device).tril(num_all - num_new)


class AttentionCosines:
    """Cosine between attention outputs over the native cache, and over one where `stand_in` replaces what it covers."""

    def __init__(self, stand_in: KVCache):
        self._stand_in = stand_in
        self._sums: dict[int, Tensor] = {}  # by layer, (heads,)
        self._tokens: dict[int, int] = {}

    @property
    def mean(self) -> Tensor:
        """(layers, heads): mean over the tokens that were read."""
        return torch.stack([self._sums[layer] / self._tokens[layer] for layer in sorted(self._sums)])

    def replaced(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """A layer's keys and values, (1, H, T, D), with the stand-in's put over them."""
        covered = slice(self._stand_in.start, self._stand_in.start + self._stand_in.num_tokens)
        keys, values = keys.clone(), values.clone()
        keys[0, :, covered], values[0, :, covered] = self._stand_in.keys[layer], self._stand_in.values[layer]
        return keys, values

    def add(self, layer: int, native: Tensor, other: Tensor) -> None:
        """Attention outputs (1, T, heads, D) of a layer."""
        cosines = torch.cosine_similarity(native[0].float(), other[0].float(), dim=-1)  # (T, heads)
        self._sums[layer] = self._sums.get(layer, torch.zeros(())) + cosines.sum(0).cpu()
        self._tokens[layer] = self._tokens.get(layer, 0) + len(cosines)


@contextmanager
def compared(model: Any, stand_ins: Sequence[KVCache]) -> Iterator[list[AttentionCosines]]:
    """While open, every attention of `model` over its own cache is computed over each stand-in as well.

    What the model reads and predicts stays the same: the queries are its native ones, in every layer. One model at a
    time; see `mappers.attention.attending_by`.
    """
    found = [AttentionCosines(stand_in) for stand_in in stand_ins]
    name = model.config._attn_implementation
    if name not in ALL_ATTENTION_FUNCTIONS:
        allowed = ", ".join(sorted(ALL_ATTENTION_FUNCTIONS))
        raise UnsupportedModel(f"attention implementation {name!r} can't be watched; allowed: {allowed}")
    plain: Attend = ALL_ATTENTION_FUNCTIONS[name]

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any) -> Any:
        output = plain(module, query, key, value, *rest, **options)
        for cosines in found:
            other = plain(module, query, *cosines.replaced(module.layer_idx, key, value), *rest, **options)
            cosines.add(module.layer_idx, output[0], other[0])
        return output

    with attending_by(model, attend, masks=name):
        yield found


Weighting = Literal["uniform", "attention"]
EFFECTIVE_SHARE = 0.5


class AttentionReceived:
    """Listens to a model that reads one document; sums up the attention that each token gets from those behind it.

    A query's attention counts in multiples of what it would pay if it paid all that it sees the same; so a token's
    share does not depend on where it stands.
    """

    def __init__(self, num_tokens: int, device: torch.device | str = "cpu"):
        self._paid = torch.zeros(num_tokens, dtype=torch.float64, device=device)
        self._queries = torch.zeros_like(self._paid)

    def __call__(self, attending: AttentionCall) -> None:
        num_new, num_all = attending.visible.shape
        own = torch.ones_like(attending.visible).tril(num_all - num_new).triu(num_all - num_new)
        others = attending.visible & ~own
        seen = attending.visible.sum(1, keepdim=True)
        paid = attending.weights().mean(0) * seen * others  # (new, all)
        self._paid[:num_all] += paid.sum(0)
        self._queries[:num_all] += others.sum(0)

    def mean(self) -> Tensor:
        """(T,): attention received a query, 1 where all tokens get the same; 1 for a token that nobody looks at."""
        heard = self._queries > 0
        return torch.where(heard, self._paid / self._queries.clamp_min(1), torch.ones_like(self._paid))


def shrunk(weights: Tensor, effective_share: float) -> Tensor:
    """Weights (n,) of mean 1, moved as little towards 1 as makes n of them tell as much as `effective_share * n`.

    With v the variance of weights of mean 1, the share is 1 / (1 + v).
    """
    scaled = weights / weights.mean()
    spread = float((scaled - 1).square().mean().sqrt())
    allowed = (1 / effective_share - 1) ** 0.5
    return scaled if spread <= allowed else 1 + (scaled - 1) * (allowed / spread)


def check_weighting(weighting: str, effective_share: float) -> None:
    """Raise `MapperError` for what is no weighting, or no share."""
    if weighting not in get_args(Weighting):
        raise MapperError(f"unknown weighting {weighting!r}; known: {', '.join(get_args(Weighting))}")
    if not 0 < effective_share <= 1:
        raise MapperError(f"effective_share is {effective_share}; allowed: above 0, up to 1")


NEAR = 64


@dataclass(frozen=True)
class _Sample:
    """One document: the source's position-free cache, and how each layer of the target attends over its own."""

    source: KVCache
    layers: dict[int, AttentionCall]


class AttentionJudge:
    """Holds some held-out documents as both models read them. Raises `CalibrationTooSmall` if all are too short."""

    @torch.no_grad()
    def __init__(self, models: tuple[Any, Any], ropes: tuple[Rope, Rope], sample: Sequence[list[int]], head: int):
        self._rope, self._head = ropes[1], head
        self._samples = [self._read(models, ropes[0], ids) for ids in sample if len(ids) > head + NEAR]
        if not self._samples:
            raise CalibrationTooSmall(
                f"no held-out document of more than {head + NEAR} tokens to judge attention by; allowed: longer "
                f"documents, or another way to choose"
            )

    @torch.no_grad()
    def error(self, blocks: Sequence[Block], outputs: Mapping[Target, Solution]) -> float:
        """1 - cosine between the attention's output over mapped and over native states, mean over queries and heads
        (and over `outputs`, each mapped alone)."""
        errors = [
            _cosine_errors(sample.layers[layer], self._mapped(sample, blocks, target, solution), target, self._head)
            for sample in self._samples
            for target, solution in outputs.items()
            for layer in [target[1]]
        ]
        return float(torch.cat(errors).mean())

    def _read(self, models: tuple[Any, Any], rope: Rope, ids: list[int]) -> _Sample:
        heard: dict[int, AttentionCall] = {}
        with watched(models[1], lambda attending: heard.__setitem__(attending.layer, attending)):
            read(models[1], ids)
        return _Sample(rope.stripped(read(models[0], ids)), heard)

    def _mapped(self, sample: _Sample, blocks: Sequence[Block], target: Target, solution: Solution) -> Tensor:
        """(H, T, D): keys with RoPE, or values."""
        states = [sample.source.of(kind)[layer] for kind, layer in blocks]
        features = torch.cat([rows_of(state) for state in states], dim=1)
        rows = (features.double() @ solution.weight + solution.bias).float()
        heads, num_tokens, dim = sample.layers[target[1]].keys.shape
        mapped = rows.view(num_tokens, heads, dim).transpose(0, 1)
        if target[0] == "keys":
            mapped = self._rope.apply(mapped, torch.arange(num_tokens, device=mapped.device), target[1])
        return mapped


def _cosine_errors(native: AttentionCall, mapped: Tensor, target: Target, head: int) -> Tensor:
    """Of every query that has something mapped to look at, all heads in a row."""
    first = head + NEAR
    queries, visible = native.queries[:, first:], native.visible[first:]
    far = torch.ones_like(visible).tril(first - NEAR)  # more than NEAR before the query
    far[:, :head] = False
    scores = scores_of(queries, native.keys, native.scale)
    exact = paid_out(_softmax(scores, visible), native.values)
    if target[0] == "keys":
        theirs = torch.where(far, scores_of(queries, mapped, native.scale), scores)
        ours = paid_out(_softmax(theirs, visible), native.values)
    else:
        weights = _softmax(scores, visible)
        ours = paid_out(weights * far, mapped) + paid_out(weights * ~far, native.values)
    return 1 - torch.cosine_similarity(ours, exact, dim=-1).flatten()


def _softmax(scores: Tensor, visible: Tensor) -> Tensor:
    return scores.masked_fill(~visible, -torch.inf).softmax(-1)
