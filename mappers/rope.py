"""Rotary position embedding, taken off keys and put back with the model's own factors.

A key is mapped where it says what the token is, not where it stands: RoPE is stripped from the source's keys and
applied again for the target. cos and sin come from the rotary module of the live model (or one rebuilt from its
config), attention scaling (the YaRN gain) included, because a mismatch between fit and serving ruins the map.

Layers may differ: in Gemma 3 those with a sliding window turn faster, in SmolLM3 every fourth does not turn at all.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mappers.cache import KVCache
from mappers.errors import PositionOutOfRange
from mappers.live import check_live
from mappers.rotary import (
    TOLERANCE,
    check_rotation,
    config_of,
    constant_positions,
    factors,
    layer_kinds,
    rebuilt_module,
    rotary_module,
)

__all__ = ["TOLERANCE", "Factors", "Rope", "inverse", "rotate"]

PROBE_POSITIONS = (0, 1, 97, 383)
FIRST_TABLE = 1024

Factors = tuple[Tensor, Tensor]  # cos and sin, (tokens, R) each


def rotate(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> Tensor:
    """`x * cos + rotate_half(x) * sin` into `out`, which must not be `x`.

    `x` and `out` are (..., D); cos and sin broadcast to (..., R) with R <= D: the other D - R dimensions pass.
    """
    half, whole = cos.shape[-1] // 2, cos.shape[-1]
    torch.mul(x[..., :whole], cos, out=out[..., :whole])
    out[..., :half].addcmul_(x[..., half:whole], sin[..., :half], value=-1)
    out[..., half:whole].addcmul_(x[..., :half], sin[..., half:])
    if whole < x.shape[-1]:
        out[..., whole:] = x[..., whole:]
    return out


def inverse(cos: Tensor, sin: Tensor) -> Factors:
    """The factors that undo a rotation by `cos`, `sin`, whose squares sum to the gain squared."""
    gain = cos.square() + sin.square()
    return cos / gain, -sin / gain


class Rope:
    """The rotary embedding of one model: `apply` turns keys to their positions, `strip` undoes it.

    `kinds` names for each layer what turns its keys, `tables` says which of the sets of factors that is: layers that
    share one share its index. `limit` is the number of positions from 0 on for which factors are known (None: all);
    beyond, every call raises `PositionOutOfRange`. See `mappers.rotary.constant_positions`.
    """

    def __init__(self, module: nn.Module, config: Any):
        self._module = module
        self._type = str(config.model_type)
        self.kinds = layer_kinds(module, config)
        self._distinct = tuple(dict.fromkeys(self.kinds))
        self.tables = tuple(self._distinct.index(kind) for kind in self.kinds)
        self.limit = constant_positions(config)
        self._factors: dict[torch.device, list[Factors]] = {}
        check_rotation(self, module)

    @classmethod
    def of(cls, model: nn.Module) -> Rope:
        """The RoPE of a live transformers model; the model reads one token twice to show that its keys turn so.

        Raises `UnsupportedModel` for a model without RoPE, or with one that turns other pairs than Llama's.
        """
        rope = cls(copy.deepcopy(rotary_module(model)).float(), model.config)
        check_live(model, rope)
        return rope

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Rope:
        """The RoPE of a model of which only the Hugging Face config dict is at hand; needs no weights."""
        built = config_of(config)
        return cls(rebuilt_module(built), built)

    def apply(self, keys: Tensor, positions: Tensor, layer: int) -> Tensor:
        """Rotate keys (H, T, D) of one layer to `positions` (T,); float32."""
        return _rotated(keys, *self.rows(positions, layer))

    def strip(self, keys: Tensor, positions: Tensor, layer: int) -> Tensor:
        """Undo `apply`: keys (H, T, D) of one layer that stand at `positions` (T,), without position; float32."""
        return _rotated(keys, *inverse(*self.rows(positions, layer)))

    def stripped(self, cache: KVCache) -> KVCache:
        """A cache whose keys carry no position; values as they are."""
        keys = tuple(self.strip(key, cache.positions, layer) for layer, key in enumerate(cache.keys))
        return KVCache(keys, cache.values, cache.start)

    def span(self, start: int, num_tokens: int, device: torch.device) -> list[Factors]:
        """cos and sin, (num_tokens, R) each, of the positions from `start` on, for each of `tables`' indices."""
        rows = slice(start, start + num_tokens)
        return [(cos[rows], sin[rows]) for cos, sin in self._grown(rows.stop, device)]

    def rows(self, positions: Tensor, layer: int) -> Factors:
        """cos and sin of one layer, (T, R) each, at `positions` (T,)."""
        end = int(positions.max()) + 1 if positions.numel() else 1
        cos, sin = self._grown(end, positions.device)[self.tables[layer]]
        return cos[positions], sin[positions]

    @property
    def probe_positions(self) -> Tensor:
        return torch.tensor([min(position, (self.limit or position + 1) - 1) for position in PROBE_POSITIONS])

    def probe(self) -> Tensor:
        """cos and sin of every table at a few fixed positions, (2, P, sum of R): stored in a bundle, compared when it
        is loaded."""
        layers = [self.tables.index(table) for table in range(len(self._distinct))]
        rows = [torch.stack(self.rows(self.probe_positions, layer)) for layer in layers]
        return torch.cat(rows, dim=-1)

    def _grown(self, end: int, device: torch.device) -> list[Factors]:
        """All tables, at least `end` rows of each."""
        if self.limit is not None and end > self.limit:
            raise PositionOutOfRange(
                f"position {end - 1} of a {self._type} whose RoPE changes behind position {self.limit - 1}: a key does "
                f"not tell by which factors it was turned; allowed: positions below {self.limit}"
            )
        tables = self._factors.get(device)
        if tables is None or len(tables[0][0]) < end:
            size = max(end, 2 * len(tables[0][0]) if tables else FIRST_TABLE)
            size = size if self.limit is None else min(size, self.limit)
            tables = [factors(self._module, kind, size, device) for kind in self._distinct]
            self._factors[device] = tables
        return tables


def _rotated(keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return rotate(keys.float(), cos, sin, torch.empty_like(keys, dtype=torch.float32))
