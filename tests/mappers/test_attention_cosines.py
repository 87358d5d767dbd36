from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mappers import Mapper, QualityProtocol, UnsupportedModel
from mappers.arms import agreement
from mappers.attention import compare_attention
from mappers.cache import KVCache
from mappers.models import generate_greedy, load_model, prefill, run
from tests.mappers.pairs import KV_HEADS, evaluate_one, random_cache, random_documents

TOKENS = random_documents(1, 90, seed=5)[0]


@pytest.fixture(scope="module")
def model(folders: dict[str, Path]) -> Any:
    return load_model(folders["large"])


def attention_outputs(model: Any, layer: int, ids: list[int], past: KVCache) -> torch.Tensor:
    """Return the input of a layer's output projection, (T, heads, D), recorded from the module."""
    seen: list[torch.Tensor] = []
    hook = model.model.layers[layer].self_attn.o_proj.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    run(model, ids, past)
    hook.remove()
    return seen[0][0].view(len(ids), 2 * KV_HEADS, -1)


def test_attention_over_a_stand_in_equals_that_over_the_mixed_cache(model: Any) -> None:
    native = prefill(model, TOKENS[:60])
    stand_in = random_cache(4, 50, seed=3, start=5)
    with compare_attention(model, [stand_in]) as (found,):
        watched = run(model, TOKENS[60:70], native)[1]
    assert found.mean.shape == (4, 4)
    mixed = KVCache.concatenate([native.slice(0, 5), stand_in, native.slice(55, 60)])
    # In the first layer the queries do not depend on the cache, so a plain run over the mixed one gives the answer.
    native_outputs, mixed_outputs = (attention_outputs(model, 0, TOKENS[60:70], past) for past in (native, mixed))
    expected = torch.cosine_similarity(native_outputs, mixed_outputs, dim=-1).mean(0)
    assert torch.allclose(found.mean[0], expected, atol=1e-5) and float(expected.max()) < 0.99
    assert torch.equal(watched, run(model, TOKENS[60:70], native)[1])


def test_only_the_given_model_is_watched_and_the_hook_is_removed(model: Any, folders: dict[str, Path]) -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    before = ALL_ATTENTION_FUNCTIONS["sdpa"]
    with pytest.raises(KeyboardInterrupt), compare_attention(model, [random_cache(4, 5)]) as (found,):
        run(load_model(folders["other"]), TOKENS[:10])
        raise KeyboardInterrupt
    with pytest.raises(RuntimeError):  # nothing was recorded
        found.mean.sum()
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is before


def test_an_unsupported_attention_implementation_is_named(folders: dict[str, Path]) -> None:
    model = load_model(folders["large"])
    model.set_attn_implementation("eager")
    with pytest.raises(UnsupportedModel, match="attention implementation 'eager' cannot be watched; allowed: .*sdpa"):
        with compare_attention(model, []):
            pass


def test_greedy_generation_equals_that_of_the_model(model: Any) -> None:
    generated = model.generate(
        torch.tensor([TOKENS[:40]]), max_new_tokens=12, min_new_tokens=12, do_sample=False, pad_token_id=0
    )
    assert generate_greedy(model, TOKENS[30:40], prefill(model, TOKENS[:30]), 12) == tuple(generated[0, 40:].tolist())


def test_agreement_counts_equal_places() -> None:
    assert agreement([1, 2, 3, 4], [1, 0, 3, 0]) == 0.5


def test_attention_and_generation_distinguish_an_exact_map_from_a_poor_one(
    twin_mapper: Mapper, sibling_mapper: Mapper, folders: dict[str, Path]
) -> None:
    protocol = QualityProtocol(lengths=(40, 60), num_documents=2, head=4, tail=8, scored=16, greedy=12)
    documents = random_documents(2, 100, seed=9)
    target = load_model(folders["large"])
    exact = evaluate_one(twin_mapper, load_model(folders["twin"]), target, documents, protocol)
    poor = evaluate_one(sibling_mapper, load_model(folders["sibling"]), target, documents, protocol)
    assert [row.layer for row in exact.attention] == [0, 1, 2, 3]
    assert all(row.min > 0.999 and row.min <= row.mean for row in exact.attention)
    assert min(row.mean for row in poor.attention[:2]) > 0.999  # copied layers
    assert max(row.mean for row in poor.attention[2:]) < 0.99
    assert exact.greedy is not None and poor.greedy is not None
    assert (exact.greedy.tokens, exact.greedy.generations) == (12, 4)
    assert exact.greedy.agreement > poor.greedy.agreement
