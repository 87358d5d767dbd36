"""Unsupported models are refused with the reason by their config alone, before anything is loaded."""

from __future__ import annotations

from typing import Any

import pytest
import transformers
from transformers import PreTrainedConfig

from mappers.errors import UnsupportedModel
from mappers.model_config import context_of, geometry_of
from mappers.rope import Rope

QUANTISED = {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "latent attention": ("DeepseekV2", {}, r"'deepseek_v2': multi-head latent attention \(kv_lora_rank 512\)"),
    "latent attention, V3": ("DeepseekV3", {}, "multi-head latent attention"),
    "state space": ("Mamba", {}, "'mamba': layers of type linear_attention; allowed: full_attention, sliding_attent"),
    "state space, second": ("Mamba2", {}, "layers of type linear_attention"),
    "recurrent": ("Rwkv", {}, "no attention heads"),
    "recurrent in part": ("RecurrentGemma", {}, "layers of type recurrent"),
    "state space in part": ("Jamba", {}, "layers of type linear_attention, mamba"),
    "both in each layer": ("FalconH1", {}, "layers of type hybrid"),
    "linear attention in part": ("Qwen3Next", {}, "'qwen3_next': layers of type linear_attention"),
    "convolution in part": ("Lfm2", {"layer_types": ["conv", "full_attention"] * 16}, "layers of type conv"),
    "chunks": ("Llama4Text", {}, "layers of type chunked_attention"),
    "shared keys and values": ("Gemma3nText", {}, "15 layers share keys and values of others"),
    "heads that differ by layer": ("Gemma4Text", {}, "layers of 4 heads of 256 and 4 heads of 512"),
    "keys wider than values": ("MiMoV2Flash", {}, "keys of 192 and values of 128 per head"),
    "encoder and decoder": ("T5", {}, "'t5': an encoder and a decoder"),
    "speech": ("Whisper", {}, "an encoder and a decoder"),
    "pictures": ("Gemma3", {}, r"more than text; allowed: the text model alone \(gemma3_text\)"),
    "ALiBi by choice": ("Falcon", {"alibi": True}, "ALiBi positions"),
    "ALiBi": ("Bloom", {}, "no max_position_embeddings"),
    "learnt positions": ("GPT2", {}, "no module named rotary_emb"),
    "quantised cache": ("Llama", {"quantization_config": QUANTISED}, r"a quantised KV cache \(kv_cache_scheme\)"),
}


def describe(config: PreTrainedConfig) -> None:
    """Run every check of a config before a model is loaded."""
    geometry_of(config.to_dict())
    context_of(config)
    Rope.from_config(config.to_dict())


@pytest.mark.parametrize("name", REFUSED)
def test_an_unsupported_model_is_refused_with_the_reason(name: str) -> None:
    family, settings, reason = REFUSED[name]
    with pytest.raises(UnsupportedModel, match=reason):
        describe(getattr(transformers, f"{family}Config")(**settings))


@pytest.mark.parametrize("family", ["Llama", "Gemma2", "Gemma3Text", "Granite", "Mixtral", "Falcon", "Olmo2", "Phi"])
def test_supported_models_are_accepted(family: str) -> None:
    describe(getattr(transformers, f"{family}Config")())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_attention_heads": 0, "head_dim": None}, "invalid config of model_type 'llama'"),
        ({"num_attention_heads": "many"}, "invalid config of model_type 'llama': .*num_attention_heads"),
        ({"rope_parameters": {"rope_type": "new", "rope_theta": 1.0}}, "no model of model_type 'llama': 'new'"),
    ],
)
def test_an_invalid_config_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        Rope.from_config(transformers.LlamaConfig().to_dict() | changes)
