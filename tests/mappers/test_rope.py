from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import CohereConfig, Gemma3TextConfig, GPT2Config, GPTNeoXConfig, LlamaConfig, PhiConfig, Qwen3Config

from mappers.errors import UnsupportedModel
from mappers.models import read
from mappers.rope import Rope
from tests.mappers.pairs import llama

SIZES = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 32}
CONTEXT = 4096
SCALED = {"rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": CONTEXT // 4}
LLAMA3 = SCALED | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def config(cls: type = LlamaConfig, **changes: Any) -> Any:
    settings = SIZES | {"max_position_embeddings": CONTEXT, "vocab_size": 300_000} | changes
    return cls(**settings)


SUPPORTED = {
    "default": config(),
    "linear": config(rope_parameters=SCALED | {"rope_type": "linear"}),
    "yarn": config(rope_parameters=SCALED | {"rope_type": "yarn"}),
    "llama3": config(rope_parameters=LLAMA3),
    "partial": config(PhiConfig),
    "partial quarter": config(GPTNeoXConfig),
    "wide heads": config(Qwen3Config, head_dim=64),
}


@pytest.mark.parametrize("name", SUPPORTED)
@pytest.mark.parametrize("start", [0, 1000, CONTEXT - 64])
def test_strip_undoes_apply_at_any_offset(name: str, start: int) -> None:
    made = SUPPORTED[name]
    head_dim = getattr(made, "head_dim", None) or made.hidden_size // made.num_attention_heads
    rope = Rope.from_config(made.to_dict())
    keys, positions = torch.randn(2, 64, head_dim), torch.arange(start, start + 64)
    turned = rope.apply(keys, positions)
    assert (rope.strip(turned, positions) - keys).abs().max() <= 1e-5
    assert (turned - keys).abs().max() > 0.1


def test_the_gain_of_yarn_is_taken_off() -> None:
    made = SUPPORTED["yarn"]
    rope = Rope.from_config(made.to_dict())
    keys, positions = torch.randn(1, 8, 8), torch.arange(100, 108)
    gain = rope.apply(keys, positions).norm() / keys.norm()
    assert gain > 1.05
    torch.testing.assert_close(rope.strip(keys, positions).norm() * gain, keys.norm())


@pytest.mark.parametrize("parameters", [None, LLAMA3, SCALED | {"rope_type": "yarn"}])
def test_stripped_keys_are_what_the_key_projection_gave(parameters: dict[str, Any] | None) -> None:
    model = llama(3, 1, rope_parameters=parameters, max_position_embeddings=CONTEXT)
    projected = []
    model.model.layers[0].self_attn.k_proj.register_forward_hook(lambda *call: projected.append(call[2][0]))
    cache = read(model, list(range(40)))
    for rope in (Rope.of(model), Rope.from_config(model.config.to_dict())):
        stripped = rope.strip(cache.keys[0], cache.positions).transpose(0, 1).flatten(1)
        torch.testing.assert_close(stripped, projected[0], atol=1e-5, rtol=0)


def test_a_longer_span_does_not_change_a_shorter_one() -> None:
    rope = Rope.from_config(SUPPORTED["llama3"].to_dict())
    before = rope.span(5, 20, torch.device("cpu"))[0].clone()
    rope.span(0, CONTEXT, torch.device("cpu"))
    assert torch.equal(rope.span(5, 20, torch.device("cpu"))[0], before)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (config(CohereConfig), "does not rotate halves"),
        (config(Gemma3TextConfig, head_dim=8), "no single RoPE"),
        (config(GPT2Config), "no single RoPE"),
        (config(rope_parameters=SCALED | {"rope_type": "dynamic"}), "'dynamic' changes with the length"),
    ],
    ids=["interleaved", "one a layer type", "none", "dynamic"],
)
def test_other_rope_is_refused(made: Any, message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        Rope.from_config(made.to_dict())


def test_an_unknown_model_type_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="unknown model_type 'nonesuch'"):
        Rope.from_config({"model_type": "nonesuch"})
