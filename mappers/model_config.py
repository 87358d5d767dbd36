"""What a model's Hugging Face config says: whether the model can be mapped, its KV geometry, its context.

A map needs one key and one value per token, layer and head, with RoPE. Sliding windows are supported: caches keep the
keys and values of all tokens, and the model's own mask hides those outside the window.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers.cache_utils import get_layer_types_and_kwargs
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from mappers.cache import KVGeometry
from mappers.errors import UnsupportedModel

LAYER_TYPES = ("full_attention", "sliding_attention")


def config_of(values: Mapping[str, Any]) -> Any:
    """Build the transformers config of a `config.json`. Raises `UnsupportedModel` for an unknown or invalid one."""
    kind = values.get("model_type")
    if kind not in CONFIG_MAPPING:
        raise UnsupportedModel(f"unknown model_type {kind!r}; known are those of the installed transformers")
    try:
        return CONFIG_MAPPING[kind].from_dict(dict(values))
    except Exception as error:  # transformers validates fields in many ways, and divides by them
        raise UnsupportedModel(f"invalid config of model_type {kind!r}: {' '.join(str(error).split())}") from error


def geometry_of(config: Any) -> KVGeometry:
    """Return the KV geometry of a transformers config or of its dict.

    Raises `UnsupportedModel` with the reason if the model cannot be mapped. `Rope` checks what only the model's code
    shows: that it uses RoPE, and which kind.
    """
    config = config_of(config) if isinstance(config, dict) else config
    if reason := _objection(config):
        raise UnsupportedModel(f"model_type {config.model_type!r}: {reason}")
    (shape,) = _shapes(config)
    return KVGeometry(config.num_hidden_layers, *shape)


def context_of(config: Any) -> int:
    """Return the max tokens of a mappable cache: the model's context, or less if its RoPE changes earlier."""
    context = getattr(config, "max_position_embeddings", None)
    if context is None:
        raise UnsupportedModel(f"model_type {config.model_type!r}: no max_position_embeddings; allowed: RoPE")
    return min(int(context), constant_positions(config) or int(context))


def constant_positions(config: Any) -> int | None:
    """Return how many positions from 0 on use the same RoPE factors, None if the factors never change.

    `dynamic` RoPE changes its frequencies with every token beyond the trained context. `longrope` switches factors when
    a forward pass goes beyond it. A cached key keeps the factors of its forward pass, which depend on how the prompt
    was chunked, and the cache does not record them.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    by_layer_type = [part for part in parameters.values() if isinstance(part, dict)] or [parameters]
    ends = []
    for part in by_layer_type:
        if part.get("rope_type") == "longrope":
            ends.append(int(part["original_max_position_embeddings"]))
        elif part.get("rope_type") == "dynamic":
            ends.append(int(config.max_position_embeddings))
    return min(ends, default=None)


def _objection(config: Any) -> str | None:
    """Return why a model of this config cannot be mapped, None if it can."""
    # 1. The architecture.
    if config.is_encoder_decoder:
        return "an encoder and a decoder; allowed: a decoder only"
    text = config.get_text_config(decoder=True)
    if text is not config:
        return f"more than text; allowed: the text model alone ({text.model_type})"
    # 2. The layers.
    if count := getattr(config, "num_kv_shared_layers", None):
        return f"{count} layers share keys and values of others; allowed: layers with their own"
    try:
        kinds = set(get_layer_types_and_kwargs(config)[0])
    except AttributeError as error:
        return f"transformers makes no cache of its layers ({error})"
    for name in ("block_types", "layers_block_type"):  # of recurrent models
        kinds |= {str(kind) for kind in getattr(config, name, None) or ()} - {"attention"}
    if other := sorted(kinds - set(LAYER_TYPES)):
        return f"layers of type {', '.join(other)}; allowed: {', '.join(LAYER_TYPES)}"
    # 3. The attention.
    if not getattr(config, "num_attention_heads", None):
        return "no attention heads, so no keys and values"
    if rank := getattr(config, "kv_lora_rank", None):
        return f"multi-head latent attention (kv_lora_rank {rank}); allowed: keys and values by head"
    if getattr(config, "alibi", False):
        return "ALiBi positions; allowed: RoPE"
    # 4. Equal shapes everywhere, unquantised.
    shapes = _shapes(config)
    if len(shapes) > 1:
        listed = " and ".join(f"{heads} heads of {dim}" for heads, dim in sorted(shapes))
        return f"layers of {listed}; allowed: the same in all layers"
    ((_, dim),) = shapes
    value_dim = getattr(config, "v_head_dim", None) or dim
    if value_dim != dim:
        return f"keys of {dim} and values of {value_dim} per head; allowed: the same"
    quantisation = getattr(config, "quantization_config", None) or {}
    if isinstance(quantisation, dict) and quantisation.get("kv_cache_scheme"):
        return "a quantised KV cache (kv_cache_scheme); allowed: float16, bfloat16, float32"
    return None


def _shapes(config: Any) -> set[tuple[int, int]]:
    """Return the distinct (KV heads, head size) of the layers."""
    shapes = set()
    for layer in config.per_layer_config[: config.num_hidden_layers]:
        heads = layer.num_attention_heads
        head_dim = getattr(layer, "head_dim", None) or layer.hidden_size // heads
        shapes.add((getattr(layer, "num_key_value_heads", None) or heads, head_dim))
    return shapes
