from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

from mappers.cache import KVCache
from mappers.errors import PositionOutOfRange, UnsupportedModel
from mappers.models import prefill
from mappers.rope import KNOWN_TYPES, Rope
from tests.mappers.pairs import llama

SIZES = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 32}
CONTEXT = 4096
ORIGINAL = CONTEXT // 4
SCALED = {"rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": ORIGINAL}
LLAMA3 = SCALED | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
FACTORS = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 4.0, 8.0, 16.0]}
TWO_BASES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


def config(family: str = "Llama", **changes: Any) -> Any:
    settings = SIZES | {"max_position_embeddings": CONTEXT, "vocab_size": 300_000} | changes
    return getattr(transformers, f"{family}Config")(**settings)


def gemma3(**changes: Any) -> Any:
    kinds = ["sliding_attention", "full_attention"]
    return config("Gemma3Text", head_dim=8, layer_types=kinds, rope_parameters=TWO_BASES, sliding_window=16, **changes)


SUPPORTED = {
    "default": config(),
    "linear": config(rope_parameters=SCALED | {"rope_type": "linear"}),
    "dynamic": config(rope_parameters=SCALED | {"rope_type": "dynamic"}),
    "yarn": config(rope_parameters=SCALED | {"rope_type": "yarn"}),
    "longrope": config(rope_parameters=SCALED | FACTORS | {"rope_type": "longrope"}),
    "llama3": config(rope_parameters=LLAMA3),
    "proportional": config(rope_parameters=SCALED | {"rope_type": "proportional", "partial_rotary_factor": 0.5}),
    "each layer type its own": gemma3(),
    "every other layer": config("SmolLM3", no_rope_layers=[1, 0]),
    "partial": config("Phi"),
    "partial quarter": config("GPTNeoX"),
    "wide heads": config("Qwen3", head_dim=64),
}


def test_every_rope_type_of_transformers_is_tested() -> None:
    assert set(KNOWN_TYPES) <= set(SUPPORTED)


@pytest.mark.parametrize("name", SUPPORTED)
@pytest.mark.parametrize("share", [0, 0.3, 1])
def test_strip_undoes_apply_up_to_the_end_of_the_context(name: str, share: float) -> None:
    made = SUPPORTED[name]
    head_dim = getattr(made, "head_dim", None) or made.hidden_size // made.num_attention_heads
    rope = Rope.from_config(made.to_dict())
    start = int(share * ((rope.limit or CONTEXT) - 64))
    keys, positions = torch.randn(2, 64, head_dim), torch.arange(start, start + 64)
    for layer, kind in enumerate(rope.kinds):
        rotated = rope.apply(keys, positions, layer)
        assert (rope.strip(rotated, positions, layer) - keys).abs().max() <= 1e-5
        assert ((rotated - keys).abs().max() > 0.1) == (kind != "no position")


@pytest.mark.parametrize("name", ["yarn", "longrope"])
def test_strip_removes_the_gain(name: str) -> None:
    rope = Rope.from_config(SUPPORTED[name].to_dict())
    keys, positions = torch.randn(1, 8, 8), torch.arange(100, 108)
    gain = rope.apply(keys, positions, 0).norm() / keys.norm()
    assert gain > 1.05
    torch.testing.assert_close(rope.strip(keys, positions, 0).norm() * gain, keys.norm())


@pytest.mark.parametrize("name", ["default", "linear", "dynamic", "yarn", "longrope", "llama3"])
def test_stripped_keys_equal_the_output_of_the_key_projection(name: str) -> None:
    model = llama(3, 1, rope_parameters=SUPPORTED[name].rope_parameters, max_position_embeddings=CONTEXT)
    projected = []
    model.model.layers[0].self_attn.k_proj.register_forward_hook(lambda *call: projected.append(call[2][0]))
    cache = prefill(model, list(range(40)))
    for rope in (Rope.of(model), Rope.from_config(model.config.to_dict())):
        stripped = rope.strip(cache.keys[0], cache.positions, 0).transpose(0, 1).flatten(1)
        torch.testing.assert_close(stripped, projected[0], atol=1e-5, rtol=0)


def test_a_longer_span_does_not_change_a_shorter_one() -> None:
    rope = Rope.from_config(SUPPORTED["llama3"].to_dict())
    before = rope.span(5, 20, torch.device("cpu"))[0][0].clone()
    rope.span(0, CONTEXT, torch.device("cpu"))
    assert torch.equal(rope.span(5, 20, torch.device("cpu"))[0][0], before)


def test_layers_of_the_same_kind_share_their_factors() -> None:
    made = config("Gemma3Text", head_dim=8, num_hidden_layers=6, sliding_window_pattern=3)
    rope = Rope.from_config(made.to_dict())
    assert rope.tables == (0, 0, 1, 0, 0, 1)
    fast, slow = (cos for cos, _ in rope.span(0, 50, torch.device("cpu")))
    assert not torch.allclose(fast, slow)


# A longrope or dynamic model changes its factors when a forward pass goes beyond a length. The factors of a cached key
# are then unknown.
@pytest.mark.parametrize(("name", "limit"), [("dynamic", 64), ("longrope", 16)])
def test_factors_are_constant_exactly_up_to_the_limit(name: str, limit: int) -> None:
    parameters = SUPPORTED[name].rope_parameters | {"original_max_position_embeddings": 16}
    model = llama(3, 1, rope_parameters=parameters, max_position_embeddings=64)
    rope = Rope.of(model)
    assert rope.limit == limit
    plain = rope.strip_cache(keys_only(model, limit)).keys[0]
    assert (plain[:, 1:] - plain[:, :1]).abs().max() < 1e-5
    beyond = keys_only(model, limit + 1)
    with pytest.raises(PositionOutOfRange, match=rf"position {limit} of a llama .* allowed: positions below {limit}"):
        rope.strip_cache(beyond)
    plain = rope.strip_cache(beyond.slice(0, limit)).keys[0]
    assert (plain[:, 1:] - plain[:, :1]).abs().max() > 1e-2


def test_a_dynamic_rope_that_has_grown_is_reset() -> None:
    model = llama(3, 1, rope_parameters=SUPPORTED["dynamic"].rope_parameters, max_position_embeddings=64)
    fresh = Rope.of(model).probe()
    keys_only(model, 200)
    assert torch.equal(Rope.of(model).probe(), fresh)


def keys_only(model: nn.Module, num_tokens: int) -> KVCache:
    """Return the model's own cache of a repeated token, from one call; keys of layer 0 differ by position only."""
    cache = model(input_ids=torch.ones(1, num_tokens, dtype=torch.long), use_cache=True).past_key_values
    return KVCache((cache.layers[0].keys[0],), (cache.layers[0].values[0],))


def test_a_layer_that_does_not_rotate_as_its_module_says_is_refused() -> None:
    model = llama(3, 3)
    layer = model.model.layers[1].self_attn
    layer.register_forward_pre_hook(without_position, with_kwargs=True)
    with pytest.raises(UnsupportedModel, match="'llama', layer 1: keys are not rotated as its RoPE"):
        Rope.of(model)


def without_position(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    cos, sin = kwargs["position_embeddings"]
    return args, kwargs | {"position_embeddings": (torch.ones_like(cos), torch.zeros_like(sin))}


def test_a_cache_of_another_shape_than_the_config_is_refused() -> None:
    model = transformers.GPTNeoXForCausalLM(config("GPTNeoX", vocab_size=64, num_key_value_heads=2))
    with pytest.raises(UnsupportedModel, match=r"'gpt_neox': a cache of .*num_kv_heads=4.* the config says .*=2"):
        Rope.of(model)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (config("Cohere"), "does not rotate halves"),
        (config("Glm", head_dim=8), "does not rotate halves"),
        (config("GptOss", head_dim=8), "does not rotate halves"),
        (config("GPT2"), "no module named rotary_emb"),
    ],
    ids=["interleaved", "interleaved in part", "other pairs", "none"],
)
def test_other_rope_is_refused(made: Any, message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        Rope.from_config(made.to_dict())


def test_an_unknown_model_type_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="unknown model_type 'nonesuch'"):
        Rope.from_config({"model_type": "nonesuch"})
