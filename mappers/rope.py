"""Rotary position embedding, taken off keys and put back with the model's own factors.

A key is mapped where it says what the token is, not where it stands: RoPE is stripped from the source's keys and
applied again for the target. cos and sin come from the rotary module of the live model (or one rebuilt from its
config), attention scaling (the YaRN gain) included, because a mismatch between fit and serving ruins the map.

Layers may differ: in Gemma 3 those with a sliding window turn faster, in SmolLM3 every fourth does not turn at all.
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
    beyond, every call raises `PositionOutOfRange`. See `mappers.rope.constant_positions`.
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


KNOWN_TYPES = ("default", *sorted(ROPE_INIT_FUNCTIONS))
ONE = "all layers"  # the kind of every layer of a model that has one set of factors
UNTURNED = "no position"  # the kind of a layer whose keys carry none
TOLERANCE = 1e-5  # float32 round trip; cos and sin carry about 6e-8


def rotary_module(model: nn.Module) -> nn.Module:
    """The module that computes cos and sin for a model."""
    named: Iterable[tuple[str, nn.Module]] = model.named_modules()
    for name, module in named:
        if name.rsplit(".", 1)[-1] == "rotary_emb":
            return module
    raise UnsupportedModel(f"{type(model).__name__} has no module named rotary_emb: only RoPE is supported")


def rebuilt_module(config: Any) -> nn.Module:
    """The same for a model of which only the config is at hand; needs no weights."""
    try:
        with torch.device("meta"):
            module = rotary_module(AutoModelForCausalLM.from_config(config))
        return type(module)(config)
    except UnsupportedModel:
        raise
    except Exception as error:  # no causal model of that kind, or fields that make no sense
        raise UnsupportedModel(f"no model of model_type {config.model_type!r}: {str(error).splitlines()[0]}") from error


def layer_kinds(module: nn.Module, config: Any) -> tuple[str, ...]:
    """For each layer the name of the factors that turn its keys: `ONE`, `UNTURNED`, or a layer type of the module's."""
    types = rope_types(module)
    unturned = [not turned for turned in getattr(config, "no_rope_layers", None) or ()]  # 1 is a layer with RoPE
    if unturned and len(types) == 1:
        return tuple(UNTURNED if left_out else ONE for left_out in unturned)
    if ONE in types:
        return (ONE,) * int(config.num_hidden_layers)
    return tuple(kind if kind in types else UNTURNED for kind in config.layer_types[: config.num_hidden_layers])


def rope_types(module: nn.Module) -> dict[str, str]:
    """The RoPE type of each kind of layer, as `layer_kinds` names them. Raises `UnsupportedModel` for another type."""
    said: Any = getattr(module, "rope_type", None)
    types = dict(said) if isinstance(said, dict) else {ONE: said}
    for kind in types.values():
        if kind not in KNOWN_TYPES:
            raise UnsupportedModel(f"rope_type {kind!r}; allowed: {', '.join(KNOWN_TYPES)}")
    return types


@torch.no_grad()
def factors(module: nn.Module, kind: str, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin, (size, R) each, of positions from 0 on for one kind of layer; float32."""
    if kind == UNTURNED:
        return torch.ones(size, 2, device=device), torch.zeros(size, 2, device=device)
    home = next(module.buffers()).device
    layer_type = () if kind == ONE else (kind,)
    x, positions = torch.zeros(1, device=home), torch.arange(size, device=home)[None]
    module(x, positions[:, :1], *layer_type)  # a dynamic RoPE that has grown shrinks again
    cos, sin = module(x, positions, *layer_type)
    return cos[0].float().to(device), sin[0].float().to(device)


def check_rotation(rope: Rope, module: nn.Module) -> None:
    """Compare with the modelling code's own function, so that an interleaved RoPE is refused rather than garbled."""
    own = getattr(sys.modules[type(module).__module__], "apply_rotary_pos_emb", None)
    if own is None or list(inspect.signature(own).parameters)[:4] != ["q", "k", "cos", "sin"]:
        raise UnsupportedModel(f"{type(module).__module__} has no apply_rotary_pos_emb(q, k, cos, sin)")
    layer = next(i for i, kind in enumerate(rope.kinds) if kind != UNTURNED)
    positions = rope.probe_positions
    cos, sin = rope.rows(positions, layer)
    keys = torch.linspace(-1, 1, 2 * cos.numel()).view(2, *cos.shape)  # (H, P, R)
    try:
        theirs = own(keys[None], keys[None], cos[None], sin[None])[1][0]
    except RuntimeError:  # factors of another shape than the keys
        theirs = torch.full_like(keys, torch.nan)
    if not torch.allclose(theirs, rope.apply(keys, positions, layer), atol=TOLERANCE):
        raise UnsupportedModel(f"{type(module).__name__} does not rotate halves; allowed: RoPE as in Llama")


LIVE_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4}  # of the keys' norm
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
        tolerance = LIVE_TOLERANCE.get(first.dtype, ROUNDED_TOLERANCE)
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
