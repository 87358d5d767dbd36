"""Rotary position embedding (RoPE): stripped from keys and reapplied with the model's own factors.

Keys are mapped without position: RoPE is stripped from the source's keys and applied again for the target. cos and sin
come from the rotary module of the live model, or from one rebuilt from its config. They include attention scaling (the
YaRN gain), since a mismatch between fit and serving ruins the map. On a live model the factors are verified.

Layers may differ: sliding-window layers of Gemma 3 rotate faster, every fourth layer of SmolLM3 does not rotate.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.cache_utils import DynamicCache
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from mappers.cache import KVCache
from mappers.errors import PositionOutOfRange, UnsupportedModel
from mappers.model_config import config_of, constant_positions, geometry_of

PROBE_POSITIONS = (0, 1, 97, 383)
FIRST_TABLE = 1024  # positions
KNOWN_TYPES = ("default", *sorted(ROPE_INIT_FUNCTIONS))
ALL_LAYERS = "all layers"  # kind of every layer in a model with one set of factors
NO_ROPE = "no position"  # kind of a layer without RoPE
TOLERANCE = 1e-5  # absolute, of a float32 round trip; cos and sin carry about 6e-8
LIVE_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4}  # relative to the norm of the keys
ROUNDED_TOLERANCE = 3e-2  # for float16 and bfloat16, which keep 11 and 8 bits

Factors = tuple[Tensor, Tensor]  # cos and sin, (tokens, R) each


def rotate(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> Tensor:
    """Write `x * cos + rotate_half(x) * sin` to `out`, which must not be `x`.

    `x` and `out` are (..., D); cos and sin broadcast to (..., R) with R <= D. The other D - R dimensions are copied.
    """
    half, whole = cos.shape[-1] // 2, cos.shape[-1]
    torch.mul(x[..., :whole], cos, out=out[..., :whole])
    out[..., :half].addcmul_(x[..., half:whole], sin[..., :half], value=-1)
    out[..., half:whole].addcmul_(x[..., :half], sin[..., half:])
    if whole < x.shape[-1]:
        out[..., whole:] = x[..., whole:]
    return out


def inverse(cos: Tensor, sin: Tensor) -> Factors:
    """Return the factors that undo a rotation by `cos` and `sin`, including its gain."""
    gain = cos.square() + sin.square()
    return cos / gain, -sin / gain


class Rope:
    """The rotary embedding of one model: `apply` rotates keys to their positions, `strip` undoes it.

    `kinds` names each layer's set of factors; `tables` gives its index among the distinct ones. `limit` is the number
    of positions with known factors, None if unlimited; see `mappers.model_config.constant_positions`. Calls beyond it
    raise `PositionOutOfRange`.
    """

    def __init__(self, module: nn.Module, config: Any):
        self._module = module
        self._type = str(config.model_type)
        self.kinds = layer_kinds(module, config)
        self._distinct = tuple(dict.fromkeys(self.kinds))
        self.tables = tuple(self._distinct.index(kind) for kind in self.kinds)
        self.limit = constant_positions(config)
        self._factors: dict[torch.device, list[Factors]] = {}
        _check_rotation(self, module)

    @classmethod
    def of(cls, model: nn.Module) -> Rope:
        """Return the RoPE of a live transformers model, verified on two forward passes of one token.

        Raises `UnsupportedModel` for a model without RoPE, or with one that pairs dimensions unlike Llama's.
        """
        rope = cls(copy.deepcopy(_rotary_module(model)).float(), model.config)
        _check_live(model, rope)
        return rope

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Rope:
        """Return the RoPE of a Hugging Face config dict. Needs no weights."""
        built = config_of(config)
        return cls(_rebuilt_module(built), built)

    def apply(self, keys: Tensor, positions: Tensor, layer: int) -> Tensor:
        """Rotate keys (H, T, D) of one layer to `positions` (T,); float32."""
        return _rotated(keys, *self.rows(positions, layer))

    def strip(self, keys: Tensor, positions: Tensor, layer: int) -> Tensor:
        """Undo `apply`: remove the rotation from keys (H, T, D) of one layer at `positions` (T,); float32."""
        return _rotated(keys, *inverse(*self.rows(positions, layer)))

    def strip_cache(self, cache: KVCache) -> KVCache:
        """Return the cache with RoPE removed from its keys. The values are unchanged."""
        keys = tuple(self.strip(key, cache.positions, layer) for layer, key in enumerate(cache.keys))
        return KVCache(keys, cache.values, cache.start)

    def span(self, start: int, num_tokens: int, device: torch.device) -> list[Factors]:
        """Return cos and sin, (num_tokens, R) each, of consecutive positions, for every index of `tables`."""
        rows = slice(start, start + num_tokens)
        return [(cos[rows], sin[rows]) for cos, sin in self._grown(rows.stop, device)]

    def rows(self, positions: Tensor, layer: int) -> Factors:
        """Return cos and sin of one layer, (T, R) each, at `positions` (T,)."""
        end = int(positions.max()) + 1 if positions.numel() else 1
        cos, sin = self._grown(end, positions.device)[self.tables[layer]]
        return cos[positions], sin[positions]

    @property
    def probe_positions(self) -> Tensor:
        return torch.tensor([min(position, (self.limit or position + 1) - 1) for position in PROBE_POSITIONS])

    def probe(self) -> Tensor:
        """Return cos and sin of every table at a few positions, (2, P, sum of R).

        Stored in a bundle, and compared when the bundle is loaded.
        """
        layers = [self.tables.index(table) for table in range(len(self._distinct))]
        rows = [torch.stack(self.rows(self.probe_positions, layer)) for layer in layers]
        return torch.cat(rows, dim=-1)

    def _grown(self, end: int, device: torch.device) -> list[Factors]:
        """Return all tables, each grown to at least `end` rows."""
        if self.limit is not None and end > self.limit:
            raise PositionOutOfRange(
                f"position {end - 1} of a {self._type} model whose RoPE changes after position {self.limit - 1}: the "
                f"factors of a cached key are unknown; allowed: positions below {self.limit}"
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


# What transformers says about a model's RoPE.


def _rotary_module(model: nn.Module) -> nn.Module:
    """Return the module that computes cos and sin."""
    named: Iterable[tuple[str, nn.Module]] = model.named_modules()
    for name, module in named:
        if name.rsplit(".", 1)[-1] == "rotary_emb":
            return module
    raise UnsupportedModel(f"{type(model).__name__} has no module named rotary_emb; allowed: models with RoPE")


def _rebuilt_module(config: Any) -> nn.Module:
    """Build the rotary module of a transformers config, without weights."""
    try:
        with torch.device("meta"):
            module = _rotary_module(AutoModelForCausalLM.from_config(config))
        return type(module)(config)
    except UnsupportedModel:
        raise
    except Exception as error:  # no causal model of this type, or invalid fields
        raise UnsupportedModel(f"no model of model_type {config.model_type!r}: {str(error).splitlines()[0]}") from error


def layer_kinds(module: nn.Module, config: Any) -> tuple[str, ...]:
    """Return for each layer the name of its factors: `ALL_LAYERS`, `NO_ROPE`, or a layer type of the module."""
    types = _rope_types(module)
    has_rope = getattr(config, "no_rope_layers", None) or ()  # despite its name, 1 is a layer with RoPE
    if has_rope and len(types) == 1:
        return tuple(ALL_LAYERS if rotated else NO_ROPE for rotated in has_rope)
    if ALL_LAYERS in types:
        return (ALL_LAYERS,) * int(config.num_hidden_layers)
    return tuple(kind if kind in types else NO_ROPE for kind in config.layer_types[: config.num_hidden_layers])


def _rope_types(module: nn.Module) -> dict[str, str]:
    """Return the RoPE type by kind of layer. Raises `UnsupportedModel` for an unknown type."""
    declared: Any = getattr(module, "rope_type", None)
    types = dict(declared) if isinstance(declared, dict) else {ALL_LAYERS: declared}
    for kind in types.values():
        if kind not in KNOWN_TYPES:
            raise UnsupportedModel(f"rope_type {kind!r}; allowed: {', '.join(KNOWN_TYPES)}")
    return types


@torch.no_grad()
def factors(module: nn.Module, kind: str, size: int, device: torch.device) -> Factors:
    """Compute cos and sin, (size, R) each, of positions from 0 on for one kind of layer; float32."""
    if kind == NO_ROPE:
        return torch.ones(size, 2, device=device), torch.zeros(size, 2, device=device)
    home = next(module.buffers()).device
    layer_type = () if kind == ALL_LAYERS else (kind,)
    x, positions = torch.zeros(1, device=home), torch.arange(size, device=home)[None]
    module(x, positions[:, :1], *layer_type)  # resets the frequencies of a dynamic RoPE that has grown
    cos, sin = module(x, positions, *layer_type)
    return cos[0].float().to(device), sin[0].float().to(device)


# Checks.


def _check_rotation(rope: Rope, module: nn.Module) -> None:
    """Raise `UnsupportedModel` unless the modelling code rotates as `rope` does; an interleaved RoPE is refused."""
    own = getattr(sys.modules[type(module).__module__], "apply_rotary_pos_emb", None)
    if own is None or list(inspect.signature(own).parameters)[:4] != ["q", "k", "cos", "sin"]:
        raise UnsupportedModel(f"{type(module).__module__} has no apply_rotary_pos_emb(q, k, cos, sin)")
    layer = next(i for i, kind in enumerate(rope.kinds) if kind != NO_ROPE)
    positions = rope.probe_positions
    cos, sin = rope.rows(positions, layer)
    keys = torch.linspace(-1, 1, 2 * cos.numel()).view(2, *cos.shape)  # (H, P, R)
    try:
        expected = own(keys[None], keys[None], cos[None], sin[None])[1][0]
    except RuntimeError:  # the factors have another shape than the keys
        expected = torch.full_like(keys, torch.nan)
    if not torch.allclose(expected, rope.apply(keys, positions, layer), atol=TOLERANCE):
        raise UnsupportedModel(f"{type(module).__name__} does not rotate halves; allowed: RoPE as in Llama")


def _check_live(model: Any, rope: Rope) -> None:
    """Raise `UnsupportedModel` if the model's cache has another shape or rotation than its config and module say.

    The hidden states of a single token do not depend on its position, so its keys at two positions differ only in the
    rotation.
    """
    name, geometry = f"model_type {model.config.model_type!r}", geometry_of(model.config)
    here, there = (_prefill_one_token(model, position) for position in (0, int(rope.probe_positions[-1])))
    if here.geometry != geometry:
        raise UnsupportedModel(f"{name}: a cache of {here.geometry}; the config says {geometry}")
    for layer, (first, second) in enumerate(zip(here.keys, there.keys, strict=True)):
        tolerance = LIVE_TOLERANCE.get(first.dtype, ROUNDED_TOLERANCE)
        plain = rope.strip(first, here.positions, layer)
        difference = rope.strip(second, there.positions, layer) - plain
        if difference.norm() > tolerance * plain.norm():
            raise UnsupportedModel(f"{name}, layer {layer}: keys are not rotated as its RoPE module says")


@torch.no_grad()
def _prefill_one_token(model: Any, position: int) -> KVCache:
    cache = DynamicCache()
    where = torch.tensor([[position]], device=model.device)
    model.base_model(input_ids=torch.ones_like(where), position_ids=where, past_key_values=cache, use_cache=True)
    keys: tuple[Tensor, ...] = tuple(layer.keys[0] for layer in cache.layers)
    return KVCache(keys, tuple(layer.values[0] for layer in cache.layers), position)
