"""What transformers says of a model's rotary embedding: its module, the layers it turns, how far it stays the same.

Nothing is derived anew: factors come from the module, and whether the keys of a live model really turn as the module
says is tried on the model itself.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from mappers.errors import UnsupportedModel

if TYPE_CHECKING:
    from mappers.rope import Rope

KNOWN_TYPES = ("default", *sorted(ROPE_INIT_FUNCTIONS))
ONE = "all layers"  # the kind of every layer of a model that has one set of factors
UNTURNED = "no position"  # the kind of a layer whose keys carry none
TOLERANCE = 1e-5  # float32 round trip; cos and sin carry about 6e-8


def config_of(values: Mapping[str, Any]) -> Any:
    """The transformers config that a `config.json` describes. Raises `UnsupportedModel` if it knows none."""
    kind = values.get("model_type")
    if kind not in CONFIG_MAPPING:
        raise UnsupportedModel(f"unknown model_type {kind!r}; known are those of the installed transformers")
    try:
        return CONFIG_MAPPING[kind].from_dict(dict(values))
    except Exception as error:  # transformers checks fields in many ways, and divides by them
        raise UnsupportedModel(f"no config of model_type {kind!r}: {' '.join(str(error).split())}") from error


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


def constant_positions(config: Any) -> int | None:
    """How many positions from 0 on a model reads with one and the same set of factors; None if it never changes.

    `dynamic` computes other frequencies with every token beyond the trained context, `longrope` takes other factors
    when a call of the model reaches beyond it. A cached key keeps those in use when it was computed, which depend on
    how the prompt was cut into calls: nothing in the cache tells.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    each = [part for part in parameters.values() if isinstance(part, dict)] or [parameters]
    ends = [end for part in each if (end := _constant_positions(part, config)) is not None]
    return min(ends, default=None)


def _constant_positions(parameters: Mapping[str, Any], config: Any) -> int | None:
    kind = parameters.get("rope_type")
    if kind == "longrope":
        return int(parameters["original_max_position_embeddings"])
    return int(config.max_position_embeddings) if kind == "dynamic" else None


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
