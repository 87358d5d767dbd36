"""Sliding-window models: the engine keeps all tokens, and its output matches the model's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from mappers.models import prefill
from tests.workers.engines import tiny
from tests.workers.engines.test_sequence import CLAIM, TOLERANCE, difference, generate_ids
from workers.engines import load_engine
from workers.engines.transformers.engine import CHUNK_TOKENS
from workers.settings import ENGINES

WINDOW = 24
LAYERS = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {"all": ("Mistral", {}), "two of three": ("Gemma3Text", LAYERS)}


SHARED = (
    "vocab_size hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim num_hidden_layers "
    "max_position_embeddings initializer_range bos_token_id eos_token_id"
).split()


def windowed_folder(folder: Path, family: str, layers: dict[str, Any]) -> Path:
    """Save a tiny Llama, and replace its weights by a model of the same size of another family."""
    llama = transformers.LlamaConfig.from_pretrained(tiny.model_folder(folder)).to_dict()
    settings = {name: llama[name] for name in SHARED} | {"sliding_window": WINDOW, "pad_token_id": 0} | layers
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(getattr(transformers, f"{family}Config")(**settings)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("engine_name", sorted(set(ENGINES) - {"vllm"}))
@pytest.mark.parametrize("layers", MODELS)
async def test_prompt_longer_than_sliding_window(tmp_path: Path, layers: str, engine_name: str) -> None:
    folder = windowed_folder(tmp_path, *MODELS[layers])
    reference = AutoModelForCausalLM.from_pretrained(folder).eval().requires_grad_(False)
    prompt = tiny.random_tokens(CHUNK_TOKENS + 2 * WINDOW)
    expected = tiny.greedy(reference, prompt, WINDOW + 8)
    engine = load_engine(tiny.settings_for(folder, engine=engine_name))
    async with engine.sequence(CLAIM, 400) as sequence:
        await sequence.prefill(prompt)
        assert difference(sequence.kv(0, len(prompt)), prefill(reference, prompt)) < TOLERANCE
        assert await generate_ids(sequence, len(expected)) == expected
    await engine.aclose()
