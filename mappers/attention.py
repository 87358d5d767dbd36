"""What the attention of a live model does while it reads, heard through transformers' own register of attention
functions: any model that attends through it can be watched, whatever its projections look like."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mappers.errors import UnsupportedModel

WATCHED = "kvrelay_watched"
PLAIN = "sdpa"


@dataclass(frozen=True)
class Attending:
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


Listener = Callable[[Attending], None]
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
        listener(Attending(module.layer_idx, query[0], key[0], value[0], visible, scale))
        return ALL_ATTENTION_FUNCTIONS[PLAIN](module, query, key, value, attention_mask, **options)

    return attend


def _visible(mask: Tensor | None, num_new: int, num_all: int, device: torch.device) -> Tensor:
    """(new, all): the mask that transformers made, or where it needs none, each token and those before it."""
    if mask is not None:
        return mask[0, 0, :, :num_all]
    return torch.ones(num_new, num_all, dtype=torch.bool, device=device).tril(num_all - num_new)
