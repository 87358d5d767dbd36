"""How far a model's attention moves when other keys and values stand in for its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mappers.attention import Attend, attending_by
from mappers.cache import KVCache
from mappers.errors import UnsupportedModel


class Cosines:
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
def compared(model: Any, stand_ins: Sequence[KVCache]) -> Iterator[list[Cosines]]:
    """While open, every attention of `model` over its own cache is computed over each stand-in as well.

    What the model reads and predicts stays the same: the queries are its native ones, in every layer. One model at a
    time; see `mappers.attention.attending_by`.
    """
    found = [Cosines(stand_in) for stand_in in stand_ins]
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
