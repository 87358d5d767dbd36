"""Rotary position embedding, taken off keys and put back with the model's own factors.

A key is mapped where it says what the token is, not where it stands: RoPE is stripped from the source's keys and
applied again for the target. cos and sin come from the rotary module of the live model (or one rebuilt from its
config), attention scaling (the YaRN gain) included, because a mismatch between fit and serving ruins the map.
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
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from mappers.errors import UnsupportedModel

# Types whose factors change with the length of the sequence: what was applied to a cached key can't be known later.
LENGTH_DEPENDENT = ("dynamic", "longrope")
PROBE_POSITIONS = (0, 1, 97, 383)
TOLERANCE = 1e-5  # float32 round trip; cos and sin carry about 6e-8


def rotate(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> Tensor:
    """`x * cos + rotate_half(x) * sin` into `out`, which must not be `x`.

    `x` and `out` are (..., D); cos and sin broadcast to (..., R) with R <= D: the other D - R dimensions pass.
    """
    half, whole = cos.shape[-1] // 2, cos.shape[-1]
    left, right = x[..., :half], x[..., half:whole]
    torch.mul(left, cos[..., :half], out=out[..., :half]).addcmul_(right, sin[..., :half], value=-1)
    torch.mul(right, cos[..., half:], out=out[..., half:whole]).addcmul_(left, sin[..., half:])
    if whole < x.shape[-1]:
        out[..., whole:] = x[..., whole:]
    return out


class Rope:
    """The rotary embedding of one model: `apply` turns keys to their positions, `strip` undoes it."""

    def __init__(self, module: nn.Module, config: Any):
        _check_type(config)
        self.module = module
        self.max_positions = int(config.max_position_embeddings)
        self._tables: dict[torch.device, tuple[Tensor, Tensor]] = {}
        _check_rotation(self, module)

    @classmethod
    def of(cls, model: nn.Module) -> Rope:
        """The RoPE of a live transformers model."""
        return cls(copy.deepcopy(_rotary_module(model)).float(), model.config)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Rope:
        """The RoPE of a model of which only the Hugging Face config dict is at hand; needs no weights."""
        kind = config.get("model_type")
        if kind not in CONFIG_MAPPING:
            raise UnsupportedModel(f"unknown model_type {kind!r}; known are those of the installed transformers")
        built = CONFIG_MAPPING[kind].from_dict(dict(config))
        _check_type(built)
        with torch.device("meta"):
            module = _rotary_module(AutoModelForCausalLM.from_config(built))
        return cls(type(module)(built), built)

    def apply(self, keys: Tensor, positions: Tensor) -> Tensor:
        """Rotate keys (H, T, D) to `positions` (T,); float32."""
        cos, sin = self._rows(positions)
        return rotate(keys.float(), cos, sin, torch.empty_like(keys, dtype=torch.float32))

    def strip(self, keys: Tensor, positions: Tensor) -> Tensor:
        """Undo `apply`: keys (H, T, D) that stand at `positions` (T,), without position; float32."""
        cos, sin = inverse(*self._rows(positions))
        return rotate(keys.float(), cos, sin, torch.empty_like(keys, dtype=torch.float32))

    def span(self, start: int, num_tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """cos and sin, (num_tokens, R) each, of the positions from `start` on."""
        cos, sin = self._grown(start + num_tokens, device)
        return cos[start : start + num_tokens], sin[start : start + num_tokens]

    def probe(self) -> Tensor:
        """cos and sin at a few fixed positions, (2, P, R): stored in a bundle, compared when it is loaded."""
        return torch.stack(self._rows(torch.tensor(PROBE_POSITIONS)))

    def _rows(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        end = int(positions.max()) + 1 if positions.numel() else 1
        cos, sin = self._grown(end, positions.device)
        return cos[positions], sin[positions]

    def _grown(self, end: int, device: torch.device) -> tuple[Tensor, Tensor]:
        tables = self._tables.get(device)
        if tables is None or len(tables[0]) < end:
            size = max(end, 2 * len(tables[0]) if tables else 1024)
            tables = self._tables[device] = _computed(self.module, size, device)
        return tables


def inverse(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """The factors that undo a rotation by `cos`, `sin`, whose squares sum to the gain squared."""
    gain = cos.square() + sin.square()
    return cos / gain, -sin / gain


@torch.no_grad()
def _computed(module: nn.Module, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    home = next(module.buffers()).device
    cos, sin = module(torch.zeros(1, device=home), torch.arange(size, device=home)[None])
    return cos[0].float().to(device), sin[0].float().to(device)


def _rotary_module(model: nn.Module) -> nn.Module:
    named: Iterable[tuple[str, nn.Module]] = model.named_modules()
    for name, module in named:
        if name.rsplit(".", 1)[-1] == "rotary_emb":
            return module
    raise UnsupportedModel(f"{type(model).__name__} has no module named rotary_emb: only RoPE is supported")


def _check_type(config: Any) -> None:
    parameters = getattr(config, "rope_parameters", None) or {}
    kind = parameters.get("rope_type", "default" if "rope_theta" in parameters else None)
    if kind is None:
        raise UnsupportedModel(f"model_type {config.model_type!r} has no single RoPE for all its layers")
    if kind in LENGTH_DEPENDENT:
        raise UnsupportedModel(f"rope_type {kind!r} changes with the length; allowed: default, linear, llama3, yarn")


def _check_rotation(rope: Rope, module: nn.Module) -> None:
    """Compare with the modelling code's own function, so that an interleaved RoPE is refused rather than garbled."""
    own = getattr(sys.modules[type(module).__module__], "apply_rotary_pos_emb", None)
    if own is None or list(inspect.signature(own).parameters)[:4] != ["q", "k", "cos", "sin"]:
        raise UnsupportedModel(f"{type(module).__module__} has no apply_rotary_pos_emb(q, k, cos, sin)")
    positions = torch.tensor(PROBE_POSITIONS)
    cos, sin = rope._rows(positions)
    keys = torch.linspace(-1, 1, 2 * cos.numel()).view(2, *cos.shape)  # (H, P, R)
    theirs = own(keys[None], keys[None], cos[None], sin[None])[1][0]
    if not torch.allclose(theirs, rope.apply(keys, positions), atol=TOLERANCE):
        raise UnsupportedModel(f"{type(module).__name__} does not rotate halves; allowed: RoPE as in Llama")
