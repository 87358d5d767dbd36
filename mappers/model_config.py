"""Which models can be mapped, told by their config alone, and the shape of what they keep.

A map needs one key and one value a token, layer and head, turned by RoPE. A window that slides over them is no
obstacle: whoever reads keeps the keys and values of all tokens, and the model's own mask hides what is behind the
window.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from transformers.cache_utils import get_layer_types_and_kwargs
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from mappers.cache import KVGeometry
from mappers.errors import UnsupportedModel

LAYER_TYPES = ("full_attention", "sliding_attention")

Check = Callable[[Any], str | None]  # of a config: the reason why it can't be mapped


def config_of(values: Mapping[str, Any]) -> Any:
    """The transformers config that a `config.json` describes. Raises `UnsupportedModel` if it knows none."""
    kind = values.get("model_type")
    if kind not in CONFIG_MAPPING:
        raise UnsupportedModel(f"unknown model_type {kind!r}; known are those of the installed transformers")
    try:
        return CONFIG_MAPPING[kind].from_dict(dict(values))
    except Exception as error:  # transformers checks fields in many ways, and divides by them
        raise UnsupportedModel(f"no config of model_type {kind!r}: {' '.join(str(error).split())}") from error


def geometry_of(config: Any) -> KVGeometry:
    """The KV geometry of a transformers config, or of the dict of one.

    Raises `UnsupportedModel` with the reason for a model that can't be mapped. What only a look at the model's code can
    tell (that there is RoPE at all, and of which kind) is for `Rope` to say.
    """
    config = config_of(config) if isinstance(config, dict) else config
    for check in CHECKS:
        if reason := check(config):
            raise UnsupportedModel(f"model_type {config.model_type!r}: {reason}")
    (shape,) = _shapes(config)
    return KVGeometry(config.num_hidden_layers, *shape)


def context_of(config: Any) -> int:
    """How many tokens a model can read such that its cache can be mapped: its context, or less where its RoPE changes
    before (`longrope`)."""
    context = getattr(config, "max_position_embeddings", None)
    if context is None:
        raise UnsupportedModel(f"model_type {config.model_type!r}: no max_position_embeddings; allowed: RoPE")
    return min(int(context), constant_positions(config) or int(context))


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


def _encoder_decoder(config: Any) -> str | None:
    return "an encoder and a decoder; allowed: a decoder only" if config.is_encoder_decoder else None


def _not_only_text(config: Any) -> str | None:
    text = config.get_text_config(decoder=True)
    return None if text is config else f"more than text; allowed: the text model alone ({text.model_type})"


def _latent(config: Any) -> str | None:
    rank = getattr(config, "kv_lora_rank", None)
    return f"multi-head latent attention (kv_lora_rank {rank}); allowed: keys and values by head" if rank else None


def _other_layers(config: Any) -> str | None:
    try:
        kinds = set(get_layer_types_and_kwargs(config)[0])
    except AttributeError as error:
        return f"layers of which transformers makes no cache ({error})"
    for name in ("block_types", "layers_block_type"):  # what recurrent models call theirs
        kinds |= {str(kind) for kind in getattr(config, name, None) or ()} - {"attention"}
    other = sorted(kinds - set(LAYER_TYPES))
    return f"layers of type {', '.join(other)}; allowed: {', '.join(LAYER_TYPES)}" if other else None


def _shared(config: Any) -> str | None:
    count = getattr(config, "num_kv_shared_layers", None)
    return f"{count} layers that take keys and values of others; allowed: layers that keep their own" if count else None


def _no_heads(config: Any) -> str | None:
    return None if getattr(config, "num_attention_heads", None) else "no attention heads, so no keys and values"


def _alibi(config: Any) -> str | None:
    return "position as ALiBi; allowed: RoPE" if getattr(config, "alibi", False) else None


def _uneven(config: Any) -> str | None:
    shapes = _shapes(config)
    if len(shapes) > 1:
        told = " and ".join(f"{heads} heads of {dim}" for heads, dim in sorted(shapes))
        return f"layers of {told}; allowed: the same in all layers"
    ((_, dim),) = shapes
    value_dim = getattr(config, "v_head_dim", None) or dim
    return None if value_dim == dim else f"keys of {dim} and values of {value_dim} a head; allowed: the same"


def _quantised(config: Any) -> str | None:
    quantisation = getattr(config, "quantization_config", None) or {}
    scheme = quantisation.get("kv_cache_scheme") if isinstance(quantisation, dict) else None
    return "a quantised KV cache (kv_cache_scheme); allowed: float16, bfloat16, float32" if scheme else None


CHECKS: tuple[Check, ...] = (
    _encoder_decoder,
    _not_only_text,
    _shared,
    _other_layers,
    _no_heads,
    _latent,
    _alibi,
    _uneven,
    _quantised,
)


def _shapes(config: Any) -> set[tuple[int, int]]:
    """Heads and head size of keys, for each kind of layer that there is."""
    return {_shape(layer) for layer in config.per_layer_config[: config.num_hidden_layers]}


def _shape(config: Any) -> tuple[int, int]:
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return getattr(config, "num_key_value_heads", None) or heads, head_dim
