"""Requirements on every architecture.

The cache equals the model's own; restored, it gives the model's own predictions; moved, it equals a prefill at the new
position; and predictions depend on it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mappers import KVCache, MapperError, PositionOutOfRange, QualityProtocol
from mappers.manifest import Kind
from mappers.model_config import context_of, geometry_of
from mappers.models import log_probs, prefill, run
from mappers.rope import Rope
from tests.mappers.architectures.zoo import (
    ARCHITECTURES,
    CONTEXT,
    SIZES,
    WINDOW,
    disguise,
    linear_mapper,
    model_of,
    zeroed,
)
from tests.mappers.pairs import fit_with, largest_difference, random_documents

TOLERANCE = 1e-4  # float32
PREFIX, ALL = 100, 120
(TOKENS,) = random_documents(1, ALL, seed=7)

every_architecture = pytest.mark.parametrize("name", ARCHITECTURES)


@torch.no_grad()
def native(model: Any) -> Tensor:
    """Return the model's own log-probabilities after each token past the prefix, from one forward pass."""
    logits: Tensor = model(input_ids=torch.tensor([TOKENS]), use_cache=False).logits
    return logits[0, PREFIX:].float().log_softmax(-1)


def on(model: Any, cache: KVCache) -> Tensor:
    """Return the same over a cache of the prefix."""
    return log_probs(model, run(model, TOKENS[PREFIX:], cache)[1])


@every_architecture
def test_a_cache_equals_the_models_own(name: str) -> None:
    model = model_of(name)
    cache = prefill(model, TOKENS)
    assert cache.geometry == geometry_of(model.config) == geometry_of(model.config.to_dict())
    own = model(input_ids=torch.tensor([TOKENS]), use_cache=True).past_key_values
    kept = [len(layer.keys[0, 0]) for layer in own.layers]
    assert set(kept) <= {ALL, WINDOW - 1} and cache.num_tokens == ALL
    for layer, length in enumerate(kept):  # the model keeps only the window of sliding layers
        for states, theirs in ((cache.keys, own.layers[layer].keys), (cache.values, own.layers[layer].values)):
            assert (states[layer][:, -length:] - theirs[0]).abs().max() <= TOLERANCE


@every_architecture
def test_a_restored_cache_gives_the_models_own_predictions(name: str) -> None:
    model = model_of(name)
    assert (on(model, prefill(model, TOKENS[:PREFIX])) - native(model)).abs().max() <= TOLERANCE


@every_architecture
def test_an_identity_map_changes_nothing(name: str) -> None:
    model = model_of(name)
    width = geometry_of(model.config).width
    mapped = linear_mapper(model, model, lambda kind, layer: torch.eye(width)).map(prefill(model, TOKENS[:PREFIX]))
    assert (on(model, mapped) - native(model)).abs().max() <= TOLERANCE


@every_architecture
def test_a_known_linear_map_is_exact(name: str) -> None:
    """Map from a cache of another shape and RoPE with the same content, mixed by known matrices."""
    target, source = model_of(name), model_of("llama", num_key_value_heads=4, head_dim=20)
    cache = prefill(target, TOKENS[:PREFIX])
    disguised, unmixing = disguise(cache, Rope.of(target), Rope.of(source), geometry_of(source.config))
    mapper = linear_mapper(source, target, unmixing)
    assert (on(target, mapper.map(disguised)) - native(target)).abs().max() <= TOLERANCE


def moved(rope: Rope, cache: KVCache, start: int) -> KVCache:
    """Return the cache with its tokens moved to positions from `start` on."""
    plain = KVCache(rope.strip_cache(cache).keys, cache.values, start)
    keys = tuple(rope.apply(key, plain.positions, layer) for layer, key in enumerate(plain.keys))
    return KVCache(keys, plain.values, start)


@every_architecture
def test_a_moved_cache_equals_a_prefill_at_its_position(name: str) -> None:
    model = model_of(name)
    there, _ = run(model, TOKENS[:50], start=70)
    assert largest_difference(moved(Rope.of(model), prefill(model, TOKENS[:50]), 70), there) <= TOLERANCE
    rebuilt = Rope.from_config(model.config.to_dict())
    assert largest_difference(moved(rebuilt, there, 0), prefill(model, TOKENS[:50])) <= TOLERANCE


@every_architecture
def test_predictions_depend_on_the_cache(name: str) -> None:
    model = model_of(name)
    cache = prefill(model, TOKENS[:PREFIX])
    assert (on(model, zeroed(cache)) - native(model)).abs().max() > 0.1


@pytest.mark.parametrize("name", ["mistral", "gemma3", "olmo3"])
def test_a_window_hides_the_tokens_outside(name: str) -> None:
    """In sliding layers of a full cache, tokens before the window have no effect."""
    model = model_of(name)
    cache = prefill(model, TOKENS[:PREFIX])
    hidden = PREFIX - WINDOW + 1  # positions outside the window of every token after the prefix
    sliding = {i for i, kind in enumerate(getattr(model.config, "layer_types", None) or [""] * 3) if kind[:4] != "full"}

    def blanked(kind: Kind) -> tuple[Tensor, ...]:
        states = [tensor.clone() for tensor in cache.of(kind)]
        for layer in sliding:
            states[layer][:, :hidden] = 9.0
        return tuple(states)

    assert torch.equal(on(model, KVCache(blanked("keys"), blanked("values"))), on(model, cache))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_rounded_cache_is_mapped_within_its_rounding(name: str, dtype: torch.dtype) -> None:
    model = model_of(name)
    cache = prefill(model, TOKENS[:PREFIX])
    rounded = KVCache(tuple(k.to(dtype) for k in cache.keys), tuple(v.to(dtype) for v in cache.values))
    identity = linear_mapper(model, model, lambda kind, layer: torch.eye(geometry_of(model.config).width))
    largest = max(float(states.abs().max()) for states in cache.keys + cache.values)
    assert largest_difference(identity.map(rounded), cache) <= torch.finfo(dtype).eps * largest


def test_rope_is_verified_on_models_in_half_precision() -> None:
    assert Rope.of(model_of("gemma3", seed=3).to(torch.bfloat16)).tables == (0, 1, 0)


def test_positions_beyond_a_change_of_factors_are_refused() -> None:
    model = model_of("phi3")
    limit = CONTEXT // 2
    assert context_of(model.config) == limit
    assert prefill(model, [1] * limit).num_tokens == limit
    with pytest.raises(PositionOutOfRange, match=f"position {limit}: the RoPE of this phi3 changes"):
        prefill(model, [1], prefill(model, [1] * limit))
    with pytest.raises(MapperError, match=f"{limit + 20} tokens exceed the context of {limit} of phi3"):
        QualityProtocol(lengths=(limit + 4,), scored=16, tail=8).check_context(model)


PAIRS = {
    "two bases from one, more layers": (("qwen2", {"num_hidden_layers": 2}), ("gemma3", {})),
    "more heads, and smaller ones": (("qwen3", {"num_key_value_heads": 1}), ("phi3", {"num_key_value_heads": 4})),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_any_two_architectures_can_be_mapped(pair: str, tmp_path: Path) -> None:
    models = [model_of(name, seed=1, **changes) for name, changes in PAIRS[pair]]
    for model, folder in zip(models, ("source", "target"), strict=True):
        model.save_pretrained(tmp_path / folder)
    documents = random_documents(12, CONTEXT // 2 + 20, seed=1)  # of which phi3 uses the part before its RoPE changes
    mapper = fit_with(tmp_path / "source", tmp_path / "target", documents, layers=1, precision="float32", data="noise")
    cache = prefill(models[0], TOKENS[:PREFIX])
    mapped = mapper.map(cache)
    assert mapped.geometry == geometry_of(models[1].config)
    distance = (native(models[1]) - on(models[1], mapped)).abs()
    assert TOLERANCE < distance.max() < distance.new_tensor(torch.inf)  # unrelated models: a map, but not an exact one


@pytest.mark.parametrize("name", ["qwen2", "gemma3"])
def test_a_planted_map_is_recovered(name: str, tmp_path: Path) -> None:
    """Two models of the same function; values of one are multiplied by matrices that its output projection undoes."""
    target = model_of(name, seed=2)
    twin = with_other_values(name)
    for model, folder in ((twin, "source"), (target, "target")):
        model.save_pretrained(tmp_path / folder)
    mapper = fit_with(
        tmp_path / "source",
        tmp_path / "target",
        random_documents(24, 60, seed=2),
        layers=1,
        precision="float32",
        copies=False,
        data="noise",
        ridges=(1e-9,),
    )
    assert [spec.values.value_layers for spec in mapper.manifest.layers] == [(0,), (1,), (2,)]
    mapped = mapper.map(prefill(twin, TOKENS[:PREFIX]))
    assert (on(target, mapped) - native(target)).abs().max() < 1e-2
    assert (on(target, prefill(twin, TOKENS[:PREFIX])) - native(target)).abs().max() > 0.1


def with_other_values(name: str) -> Any:
    twin = model_of(name, seed=2, tie_word_embeddings=model_of(name, seed=2).config.tie_word_embeddings)
    twin.load_state_dict(model_of(name, seed=2).state_dict())
    generator = torch.Generator().manual_seed(0)
    heads, kv_heads = SIZES["num_attention_heads"], SIZES["num_key_value_heads"]
    for layer in twin.model.layers:
        attention = layer.self_attn
        dim = attention.head_dim
        for head in range(kv_heads):
            rows = slice(head * dim, (head + 1) * dim)
            mixing = torch.eye(dim) + 0.3 * torch.randn(dim, dim, generator=generator)
            attention.v_proj.weight[rows] = mixing @ attention.v_proj.weight[rows]
            if attention.v_proj.bias is not None:
                attention.v_proj.bias[rows] = mixing @ attention.v_proj.bias[rows]
            for query in range(head * heads // kv_heads, (head + 1) * heads // kv_heads):
                columns = slice(query * dim, (query + 1) * dim)
                attention.o_proj.weight[:, columns] = attention.o_proj.weight[:, columns] @ mixing.inverse()
    return twin
