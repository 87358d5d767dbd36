"""One forward pass over several sequences: each result is bitwise what it would be alone."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from mappers.model_config import geometry_of
from tests.mappers.architectures.zoo import WINDOW, model_of
from tests.mappers.pairs import random_documents
from workers.engines.transformers.forward import (
    BATCHED,
    BLOCK_BYTES,
    RowwiseLinear,
    attention_for,
    can_batch,
    decode,
    make_rowwise,
)
from workers.engines.transformers.memory import WorkingMemory

CPU = torch.device("cpu")
NAMES = {"gemma3_text": "gemma3"}  # names in the zoo that differ from the model type
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
LENGTHS = (1, 7, WINDOW + 9, 60)
NUM_STEPS = 5


def random_model(model_type: str) -> Any:
    if model_type == "phi3":  # the zoo's RoPE depends on the longest row
        return model_of.__wrapped__("phi3", rope_parameters=PLAIN_ROPE)
    return model_of(NAMES.get(model_type, model_type))


def as_served(random: Any) -> Any:
    """Return the model as the engine loads it."""
    model = copy.deepcopy(random)
    model.set_attn_implementation(attention_for(CPU))
    make_rowwise(model)
    return model


def memory_of(model: Any, token_ids: Sequence[int]) -> WorkingMemory:
    """Return a full memory that holds these tokens."""
    memory = WorkingMemory(geometry_of(model.config), len(token_ids), dtype=torch.float32, device=CPU)
    positions = torch.arange(len(token_ids))[None]
    model(input_ids=torch.tensor([token_ids]), position_ids=positions, past_key_values=memory.cache, use_cache=True)
    return memory


def continue_all(model: Any, prompts: Sequence[Sequence[int]]) -> list[tuple[list[int], Tensor, Tensor]]:
    """Continue all prompts together. Returns the greedy tokens, the logits and the last layer's keys of each."""
    memories = [memory_of(model, prompt[:-1]) for prompt in prompts]
    tokens = [prompt[-1] for prompt in prompts]
    logits = []
    for _ in range(NUM_STEPS):
        logits.append(decode(model, memories, tokens))  # (B, vocab)
        tokens = logits[-1].argmax(-1).tolist()
    by_row = torch.stack(logits, dim=1)  # (B, steps, vocab)
    keys = [memory.kv(0, memory.num_tokens).keys[-1] for memory in memories]
    return [(rows.argmax(-1).tolist(), rows, key) for rows, key in zip(by_row, keys, strict=True)]


@torch.no_grad()
@pytest.mark.parametrize("name", sorted(BATCHED))
def test_row_is_bitwise_equal_alone_and_in_any_batch(name: str) -> None:
    model = as_served(random_model(name))
    assert can_batch(model)
    for seed in range(3):
        prompts = [ids[: length + 1] for ids, length in zip(random_documents(4, 80, seed=seed), LENGTHS, strict=True)]
        alone = [continue_all(model, [prompt])[0] for prompt in prompts]
        for order in ([0, 1, 2, 3], [3, 1], [2, 0, 3]):
            together = continue_all(model, [prompts[i] for i in order])
            for i, (tokens, logits, keys) in zip(order, together, strict=True):
                assert tokens == alone[i][0]
                assert torch.equal(logits, alone[i][1]) and torch.equal(keys, alone[i][2])


@torch.no_grad()
@pytest.mark.parametrize("name", sorted(BATCHED))
def test_row_matches_plain_model(name: str) -> None:
    model = random_model(name)
    prompts = [ids[: length + 1] for ids, length in zip(random_documents(4, 80, seed=9), LENGTHS, strict=True)]
    for prompt, (tokens, logits, _) in zip(prompts, continue_all(as_served(model), prompts), strict=True):
        own = model(input_ids=torch.tensor([prompt + tokens[:-1]]), use_cache=False)
        assert (own.logits[0, -NUM_STEPS:] - logits).abs().max() < 1e-3


def test_failed_step_leaves_memories_unchanged() -> None:
    model = as_served(random_model("llama"))
    prompts = random_documents(2, 9, seed=3)
    memories = [memory_of(model, prompt[:-1]) for prompt in prompts]
    failing = model.model.layers[-1].register_forward_pre_hook(lambda *_: torch.zeros(1)[2])
    with pytest.raises(IndexError):
        decode(model, memories, [prompt[-1] for prompt in prompts])
    failing.remove()
    assert [memory.num_tokens for memory in memories] == [8, 8]
    again = decode(model, memories, [prompt[-1] for prompt in prompts])
    fresh = decode(model, [memory_of(model, prompt[:-1]) for prompt in prompts], [prompt[-1] for prompt in prompts])
    assert torch.equal(again, fresh)


def test_dynamic_rope_is_not_batched() -> None:
    assert not can_batch(as_served(model_of("phi3")))


def test_untested_model_type_is_not_batched() -> None:
    assert not can_batch(as_served(model_of("stablelm")))


@pytest.fixture(params=[1, 3])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@torch.no_grad()
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("size", [90, 97])  # 97 is not divisible among 3 threads
@pytest.mark.usefixtures("num_threads")
def test_rowwise_product_in_blocks_matches_plain_layer(size: int, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.engines.transformers.forward.BLOCK_BYTES", 4000)
    plain = torch.nn.Linear(32, size, bias=bias)
    layers = torch.nn.Sequential(plain)
    make_rowwise(layers)
    hidden = torch.randn(3, 1, 32)
    assert (layers(hidden) - plain(hidden)).abs().max() < 1e-5
    assert torch.equal(layers(hidden)[1:2], layers(hidden[1:2]))


@pytest.mark.parametrize("shape", [(49152, 576), (151936, 1024), (1000, 8)], ids=str)
def test_weight_blocks_are_divisible_among_threads(shape: tuple[int, int]) -> None:
    layer = torch.nn.Linear(shape[1], shape[0], bias=False, device="meta")
    blocks = RowwiseLinear(layer).blocks_of(layer.weight)
    assert sum(map(len, blocks)) == shape[0]
    assert all(len(block) % 8 == 0 and block.nbytes <= BLOCK_BYTES for block in blocks)


@torch.no_grad()
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 2, 32), (1, 64, 32), (2, 5, 32), (7, 32)], ids=str)
def test_prompt_product_matches_plain_layer(shape: tuple[int, ...], bias: bool) -> None:
    plain = torch.nn.Linear(32, 100, bias=bias)
    layers = torch.nn.Sequential(plain)
    make_rowwise(layers)
    hidden = torch.randn(shape)
    output = layers(hidden)
    assert output.is_contiguous() and (output - plain(hidden)).abs().max() < 1e-5
