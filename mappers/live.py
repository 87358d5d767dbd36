"""Tries on a live model what its config and its modules say: the shape of its cache, and how its keys turn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from mappers.cache import KVCache
from mappers.errors import UnsupportedModel
from mappers.support import geometry_of

if TYPE_CHECKING:
    from mappers.rope import Rope

TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4}  # of the keys' norm
ROUNDED_TOLERANCE = 3e-2  # float16 and bfloat16 keep 11 and 8 bits


def check_live(model: Any, rope: Rope) -> None:
    """Raise `UnsupportedModel` if the model's cache has another shape, or its keys turn otherwise, than is said.

    One token alone is read to the same states wherever it stands, so its keys at two positions differ by nothing but
    the rotation.
    """
    name, geometry = f"model_type {model.config.model_type!r}", geometry_of(model.config)
    here, there = (_read_one_token(model, position) for position in (0, int(rope.probe_positions[-1])))
    if here.geometry != geometry:
        raise UnsupportedModel(f"{name}: a cache of {here.geometry}, where its config says {geometry}")
    for layer, (first, second) in enumerate(zip(here.keys, there.keys, strict=True)):
        tolerance = TOLERANCE.get(first.dtype, ROUNDED_TOLERANCE)
        plain = rope.strip(first, here.positions, layer)
        difference = rope.strip(second, there.positions, layer) - plain
        if difference.norm() > tolerance * plain.norm():
            raise UnsupportedModel(f"{name}, layer {layer}: keys do not turn as its RoPE module says")


@torch.no_grad()
def _read_one_token(model: Any, position: int) -> KVCache:
    cache = DynamicCache()
    where = torch.tensor([[position]], device=model.device)
    model.base_model(input_ids=torch.ones_like(where), position_ids=where, past_key_values=cache, use_cache=True)
    keys: tuple[Tensor, ...] = tuple(layer.keys[0] for layer in cache.layers)
    return KVCache(keys, tuple(layer.values[0] for layer in cache.layers), position)
