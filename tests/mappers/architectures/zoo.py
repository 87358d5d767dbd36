"""Tiny random models of many architectures, and maps between caches that are known to be exact."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import transformers
from torch import Tensor

from mappers.cache import KVCache, KVGeometry
from mappers.manifest import (
    KINDS,
    Calibration,
    Kind,
    LayerSpec,
    Manifest,
    ModelCard,
    OutputSpec,
    probe_name,
    weight_name,
)
from mappers.mapper import Mapper
from mappers.model_config import geometry_of
from mappers.models import config_dict
from mappers.rope import Rope

VOCABULARY = 64
CONTEXT = 256
WINDOW = 24  # of sliding layers; much shorter than the prefixes of the tests
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
GROUPS = ["sliding_attention", "full_attention", "sliding_attention"]
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 4.0, 8.0, 16.0],
    "original_max_position_embeddings": CONTEXT // 2,
}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": CONTEXT // 4}
HALF = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"rope_parameters": YARN}),
    "qwen2": ("Qwen2", {}),  # biases
    "qwen3": ("Qwen3", {"head_dim": 16}),  # norms on queries and keys
    "mistral": ("Mistral", {"head_dim": 8, "sliding_window": WINDOW}),  # a window in all layers
    "gemma3": ("Gemma3Text", {"head_dim": 8, "sliding_window": WINDOW, "layer_types": GROUPS}),  # two bases
    "phi3": ("Phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": CONTEXT // 2}),  # fused
    "stablelm": ("StableLm", {"rope_parameters": HALF}),
    "gpt-neox": ("GPTNeoX", {"rope_parameters": HALF, "num_key_value_heads": 4}),  # fused, heads not grouped
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 1, 0]}),  # a layer without position
    "olmo3": ("Olmo3", {"sliding_window": WINDOW, "layer_types": GROUPS}),
}


@cache
def model_of(name: str, seed: int = 0, **changes: Any) -> Any:
    """Build a random model whose predictions depend on its input, thanks to a wide initialisation."""
    family, settings = ARCHITECTURES[name]
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**SIZES | settings | changes)
    model = transformers.AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("bias"):
                parameter.normal_(std=0.3)  # biases start at 0 and norms at 1, which would leave them untested
            elif parameter.ndim == 1:
                parameter.mul_(1 + 0.3 * torch.randn_like(parameter)).add_(0.1)
    return model


def linear_mapper(source: Any, target: Any, matrix: Callable[[str, int], Tensor]) -> Mapper:
    """Map target layer i from source layer i by `matrix(kind, i)` (source width, target width), with both RoPEs."""
    cards = card(source), card(target)
    weights: dict[str, Tensor] = {}
    specs = []
    for layer in range(cards[1].num_layers):
        specs.append(
            LayerSpec(
                keys=OutputSpec(method="ridge", key_layers=(layer,)),
                values=OutputSpec(method="ridge", value_layers=(layer,)),
            )
        )
        for kind in KINDS:
            weights[weight_name(layer, kind, "weight")] = matrix(kind, layer)
            weights[weight_name(layer, kind, "bias")] = torch.zeros(cards[1].geometry.width)
    for role, model in (("source", source), ("target", target)):
        weights[probe_name(role)] = Rope.of(model).probe()
    manifest = Manifest(
        source=cards[0],
        target=cards[1],
        method="ridge",
        layers=tuple(specs),
        precision="float32",
        calibration=Calibration(name="none", digest="0" * 64, num_documents=0, num_tokens=0, head=0),
        created="2026-01-01",
        tool_version="test",
        licence="none",
    )
    return Mapper(manifest, weights)


def card(model: Any) -> ModelCard:
    geometry = geometry_of(model.config)
    return ModelCard(
        name=model.config.model_type,
        fingerprint="0" * 64,
        num_layers=geometry.num_layers,
        num_kv_heads=geometry.num_kv_heads,
        head_dim=geometry.head_dim,
        config=config_dict(model),
    )


def disguise(cache: KVCache, rope: Rope, other: Rope, shape: KVGeometry, seed: int = 0) -> tuple[KVCache, Any]:
    """Return a cache of another shape and RoPE with the content of `cache`, and the matrices that undo it.

    Each layer is multiplied by a random matrix (width, other width), which has a left inverse as the other is wider.
    """
    generator = torch.Generator().manual_seed(seed)
    mixing = {
        (kind, layer): torch.randn(cache.geometry.width, shape.width, generator=generator) / shape.width**0.5
        for kind in KINDS
        for layer in range(shape.num_layers)
    }
    plain = rope.strip_cache(cache)

    def mixed(kind: Kind, layer: int) -> Tensor:
        rows: Tensor = plain.of(kind)[layer].transpose(0, 1).flatten(1) @ mixing[kind, layer]  # (T, other width)
        return rows.view(cache.num_tokens, shape.num_kv_heads, shape.head_dim).transpose(0, 1)

    layers = range(shape.num_layers)
    keys = tuple(other.apply(mixed("keys", layer), cache.positions, layer) for layer in layers)
    disguised = KVCache(keys, tuple(mixed("values", layer) for layer in layers), cache.start)
    return disguised, lambda kind, layer: torch.linalg.pinv(mixing[kind, layer].double()).float()


def zeroed(cache: KVCache) -> KVCache:
    return KVCache(tuple(map(torch.zeros_like, cache.keys)), tuple(map(torch.zeros_like, cache.values)), cache.start)
