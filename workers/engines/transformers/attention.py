"""SDPA with grouped queries kept grouped.

transformers repeats keys and values for every query head whenever there is a mask, since CUDA's kernels want it so.
The CPU's do not: passing them as they are saves copying the whole cache in every layer of every chunk.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

NAME = "kvrelay_grouped_sdpa"


def attention_for(device: torch.device) -> str:
    """The `attn_implementation` to load a model with."""
    if device.type != "cpu":
        return "sdpa"
    AttentionInterface.register(NAME, grouped_sdpa)
    AttentionMaskInterface.register(NAME, float_mask)
    return NAME


def float_mask(*args: Any, dtype: torch.dtype, **kwargs: Any) -> Tensor | None:
    """`sdpa_mask` as what is added to the scores, 0 or minus infinity: of truth values, each layer would make that."""
    seen = sdpa_mask(*args, dtype=dtype, **kwargs)
    if seen is None:
        return None
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)


def grouped_sdpa(
    module: torch.nn.Module,
    query: Tensor,
    key: Any,
    value: Any,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """`query` is `(1, heads, new tokens, dim)`, `key` and `value` `(1, kv heads, all tokens, dim)`.

    Without a mask, either one new token sees everything, or new tokens and all tokens are the same and see backwards.
    One new token of each of B sequences, `(B, heads, 1, dim)`, comes with a tuple of B keys and one of B values.
    """
    if isinstance(key, tuple):
        seen = slice(-sliding_window, None) if sliding_window else slice(None)
        rows = zip(query.chunk(len(key)), key, value, strict=True)
        attended = [_attend(q, k[:, :, seen], v[:, :, seen], None, scaling) for q, k, v in rows]
        return torch.cat(attended), None  # (B, 1, heads, dim)
    return _attend(query, key, value, attention_mask, scaling), None


def _attend(query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float | None) -> Tensor:
    attended = torch.nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        is_causal=attention_mask is None and query.shape[2] > 1,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return attended.transpose(1, 2).contiguous()  # (1, new tokens, heads, dim)
