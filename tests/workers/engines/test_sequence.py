"""Sequences give the tokens and the KV of transformers itself, however they are cut into steps."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from mappers.cache import KVCache, KVGeometry
from mappers.models import prefill
from tests.workers.engines.tiny import greedy, random_tokens
from workers.api.errors import DeadlineExceeded
from workers.engines.base import Engine, PoolLocation, Sampling, TokenSequence
from workers.engines.scheduling import Claim, Compute
from workers.engines.transformers.engine import CHUNK_TOKENS, TransformersEngine, TransformersSequence
from workers.engines.transformers.memory import BufferPool, WorkingMemory

CLAIM = Claim()
TOLERANCE = 1e-4  # float32 sums in another order


@dataclass(frozen=True)
class CopySource:
    """A source whose KV a function copies into the sequence's views."""

    copy: Callable[[KVCache], None]

    def __call__(self, views: KVCache, /) -> None:
        self.copy(views)

    @property
    def location(self) -> PoolLocation:
        raise NotImplementedError


def difference(left: KVCache, right: KVCache) -> float:
    pairs = zip(left.keys + left.values, right.keys + right.values, strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


async def generate_ids(sequence: TokenSequence, num_tokens: int, sampling: Sampling | None = None) -> list[int]:
    return [token.id async for token in sequence.generate(sampling or Sampling(), num_tokens)]


@pytest.mark.parametrize("num_tokens", [1, 2, CHUNK_TOKENS, CHUNK_TOKENS + 1, 3 * CHUNK_TOKENS - 5])
async def test_chunked_prefill_equals_one_pass(engine: Engine, reference: LlamaForCausalLM, num_tokens: int) -> None:
    ids = random_tokens(num_tokens)
    async with engine.sequence(CLAIM, num_tokens) as sequence:
        await sequence.prefill(ids)
        assert sequence.token_ids == ids
        assert difference(sequence.kv(0, num_tokens), prefill(reference, ids)) < TOLERANCE


@pytest.mark.parametrize("num_tokens", [1, 40, 300])
async def test_greedy_tokens_match_generate(engine: Engine, reference: LlamaForCausalLM, num_tokens: int) -> None:
    prompt = random_tokens(num_tokens, seed=3)
    expected = greedy(reference, prompt, 24)
    async with engine.sequence(CLAIM, num_tokens + 24) as sequence:
        await sequence.prefill(prompt)
        assert await generate_ids(sequence, len(expected)) == expected


async def test_logprobs_match_model(engine: Engine, reference: LlamaForCausalLM) -> None:
    prompt = random_tokens(30)
    logprobs = reference(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
    values, ids = logprobs.topk(3)
    async with engine.sequence(CLAIM, 40) as sequence:
        await sequence.prefill(prompt)
        async for token in sequence.generate(Sampling(temperature=0.7, top_p=0.5, seed=1, num_top=3), 1):
            assert [i for i, _ in token.top] == ids.tolist()
            assert [p for _, p in token.top] == pytest.approx(values.tolist(), abs=TOLERANCE)
            assert token.logprob == pytest.approx(float(logprobs[token.id]), abs=TOLERANCE)


async def test_loaded_kv_replaces_prefill(engine: Engine, reference: LlamaForCausalLM) -> None:
    prompt, cut = random_tokens(90), 61
    known = prefill(reference, prompt[:cut])

    def source(views: KVCache) -> None:
        for view, tensor in zip(views.keys + views.values, known.keys + known.values, strict=True):
            view.copy_(tensor)

    async with engine.sequence(CLAIM, 100) as sequence:
        await sequence.load(prompt[:cut], CopySource(source))
        await sequence.prefill(prompt[cut:])
        assert difference(sequence.kv(0, 90), prefill(reference, prompt)) < TOLERANCE
        assert await generate_ids(sequence, 8) == greedy(reference, prompt, 8)
        with pytest.raises(ValueError, match="must be empty"):
            await sequence.load(prompt, CopySource(source))


async def test_loaded_kv_is_attended_over(engine: Engine, reference: LlamaForCausalLM) -> None:
    prompt = random_tokens(40)

    def zeros(views: KVCache) -> None:
        for view in views.keys + views.values:
            view.zero_()

    async with engine.sequence(CLAIM, 40) as sequence:
        await sequence.load(prompt[:30], CopySource(zeros))
        await sequence.prefill(prompt[30:])
        assert difference(sequence.kv(30, 40), prefill(reference, prompt).slice(30, 40)) > 0.01


async def test_memory_grows_beyond_capacity(engine: Engine, reference: LlamaForCausalLM) -> None:
    prompt = random_tokens(50)
    async with engine.sequence(CLAIM, 4) as sequence:
        await sequence.prefill(prompt)
        assert await generate_ids(sequence, 16) == greedy(reference, prompt, 16)


def test_memory_grows_ahead_up_to_context() -> None:
    memory = WorkingMemory(KVGeometry(1, 1, 2), 60, dtype=torch.float32, device=torch.device("cpu"), limit=100)
    sizes = []
    for num_tokens in (60, 61, 91, 100):
        memory.reserve(num_tokens)
        sizes.append(memory.capacity)
    assert sizes == [60, 90, 100, 100]


def test_free_returns_buffer_without_garbage_collection() -> None:
    buffers = BufferPool()

    def allocate() -> WorkingMemory:
        device = torch.device("cpu")
        return WorkingMemory(KVGeometry(2, 4, 64), 1024, dtype=torch.float32, device=device, buffers=buffers)

    gc.disable()  # the memory and its layers are a reference cycle
    try:
        memory = allocate()
        address, view = memory.kv(0, 1).keys[0].data_ptr(), memory.kv(0, 4)
        memory.free()
        assert allocate().kv(0, 1).keys[0].data_ptr() != address, "a view is left"
        del view
        assert allocate().kv(0, 1).keys[0].data_ptr() == address
    finally:
        gc.enable()


async def test_closed_sequence_frees_memory(engine: TransformersEngine) -> None:
    async with engine.sequence(CLAIM, 40) as sequence:
        await sequence.prefill(random_tokens(30))
        assert isinstance(sequence, TransformersSequence) and sequence.memory.capacity == 40
    assert sequence.memory.capacity == 0


async def test_truncate_drops_tokens(engine: Engine, reference: LlamaForCausalLM) -> None:
    prompt, other = random_tokens(50), random_tokens(20, seed=9)
    async with engine.sequence(CLAIM, 100) as sequence:
        await sequence.prefill(prompt)
        sequence.truncate(30)
        await sequence.prefill(other)
        assert difference(sequence.kv(0, 50), prefill(reference, prompt[:30] + other)) < TOLERANCE


async def test_predictions_match_model(engine: Engine, reference: LlamaForCausalLM) -> None:
    prompt = random_tokens(300)
    expected = reference(torch.tensor([prompt])).logits[0].argmax(-1).tolist()
    async with engine.sequence(CLAIM, 300) as sequence:
        assert await sequence.predict(prompt) == expected


async def test_generate_requires_prefill(engine: Engine) -> None:
    async with engine.sequence(CLAIM, 4) as sequence:
        with pytest.raises(ValueError, match="needs a prefilled token"):
            await generate_ids(sequence, 1)


async def test_seeded_sampling_is_reproducible(engine: Engine) -> None:
    async def draw(seed: int) -> list[int]:
        async with engine.sequence(CLAIM, 64) as sequence:
            await sequence.prefill(random_tokens(20))
            return await generate_ids(sequence, 16, Sampling(temperature=1.5, seed=seed))

    first = await draw(1)
    assert await draw(1) == first
    assert await draw(2) != first


async def test_tiny_top_p_is_greedy(engine: Engine, reference: LlamaForCausalLM) -> None:
    prompt = random_tokens(20)
    async with engine.sequence(CLAIM, 64) as sequence:
        await sequence.prefill(prompt)
        sampling = Sampling(temperature=1.0, top_p=1e-6, seed=0)
        assert await generate_ids(sequence, 8, sampling) == greedy(reference, prompt, 8)


async def test_tiny_temperature_is_greedy(engine: Engine, reference: LlamaForCausalLM) -> None:
    prompt = random_tokens(20)
    async with engine.sequence(CLAIM, 64) as sequence:
        await sequence.prefill(prompt)
        assert await generate_ids(sequence, 8, Sampling(temperature=1e-40)) == greedy(reference, prompt, 8)


async def test_failing_answer_does_not_end_others(engine: Engine, reference: LlamaForCausalLM) -> None:
    prompts = [random_tokens(n, seed=n) for n in (10, 30)]
    async with engine.sequence(CLAIM, 64) as good, engine.sequence(CLAIM, 64) as bad:
        await good.prefill(prompts[0])
        await bad.prefill(prompts[1])
        bad.kv(0, 30).values[0].fill_(torch.nan)
        drawn = generate_ids(bad, 8, Sampling(temperature=1.0))
        answer, failed = await asyncio.gather(generate_ids(good, 8), drawn, return_exceptions=True)
    assert answer == greedy(reference, prompts[0], 8)
    assert isinstance(failed, RuntimeError)


async def test_sampling_follows_temperature(engine: Engine, reference: LlamaForCausalLM) -> None:
    prompt, temperature, draws = random_tokens(20), 0.8, 400
    expected = (reference(torch.tensor([prompt])).logits[0, -1] / temperature).softmax(-1)
    likely = int(expected.argmax())
    hits = 0
    async with engine.sequence(CLAIM, 64) as sequence:
        await sequence.prefill(prompt)
        for seed in range(draws):
            hits += await generate_ids(sequence, 1, Sampling(temperature=temperature, seed=seed)) == [likely]
    share, spread = float(expected[likely]), float((expected[likely] * (1 - expected[likely]) / draws) ** 0.5)
    assert abs(hits / draws - share) < 4 * spread


async def test_concurrent_sequences_are_isolated(engine: Engine, reference: LlamaForCausalLM) -> None:
    prompts = [random_tokens(n, seed=n) for n in (10, 130, 300, 520)]

    async def answer(prompt: list[int]) -> list[int]:
        async with engine.sequence(CLAIM, 600) as sequence:
            await sequence.prefill(prompt)
            return await generate_ids(sequence, 10)

    answers = await asyncio.gather(*(answer(prompt) for prompt in prompts))
    for prompt, got in zip(prompts, answers, strict=True):
        expected = greedy(reference, prompt, 10)
        assert got[: len(expected)] == expected


async def test_no_step_starts_after_deadline(engine: Engine) -> None:
    async with engine.sequence(Claim(deadline=time.monotonic() - 1), 10) as sequence:
        with pytest.raises(DeadlineExceeded):
            await sequence.prefill(random_tokens(10))
        assert sequence.num_tokens == 0


async def test_cancelled_prefill_stops_within_one_chunk(engine: Engine) -> None:
    async with engine.sequence(CLAIM, 1000) as sequence:
        prefilling = asyncio.create_task(sequence.prefill(random_tokens(1000)))
        await asyncio.sleep(0)
        await engine.compute.run(lambda: None)  # runs after the first chunk
        prefilling.cancel()
        await asyncio.wait([prefilling])
        reached = sequence.num_tokens
        assert prefilling.cancelled() and CHUNK_TOKENS <= reached <= 2 * CHUNK_TOKENS
        await engine.compute.run(lambda: None)
        assert sequence.num_tokens == reached


async def test_rates_are_measured(engine: Engine) -> None:
    assert engine.rates.snapshot().prefill_tokens_per_s is None
    async with engine.sequence(CLAIM, 100) as sequence:
        await sequence.prefill(random_tokens(64))
        await generate_ids(sequence, 4)
    rates = engine.rates.snapshot()
    assert rates.prefill_tokens_per_s and rates.decode_tokens_per_s


async def test_batched_answers_equal_single_answers(engine: Engine) -> None:
    prompts, num_tokens = [random_tokens(n, seed=n) for n in (9, 40, 41, 150, 300)], 12

    async def answer(prompt: list[int]) -> list[tuple[int, float]]:
        async with engine.sequence(CLAIM, 400) as sequence:
            await sequence.prefill(prompt)
            return [(token.id, token.logprob) async for token in sequence.generate(Sampling(), num_tokens)]

    alone = [await answer(prompt) for prompt in prompts]
    engine.compute = counting = CountingCompute(engine.compute)  # type: ignore[assignment]
    assert await asyncio.gather(*(answer(prompt) for prompt in prompts)) == alone
    assert counting.num_steps < len(prompts) * num_tokens / 2


async def test_decoding_continues_between_prefill_chunks(engine: Engine) -> None:
    num_tokens = 40
    async with engine.sequence(CLAIM, 100) as short, engine.sequence(CLAIM, 1000) as long:
        await short.prefill(random_tokens(10))
        tokens = short.generate(Sampling(), num_tokens)
        await anext(tokens)
        task = asyncio.create_task(long.prefill(random_tokens(1000)))
        num_at_each_token = [long.num_tokens async for _ in tokens]
        await task
    assert len({1 * CHUNK_TOKENS, 2 * CHUNK_TOKENS, 3 * CHUNK_TOKENS} & set(num_at_each_token)) >= 2


class CountingCompute:
    """Counts the steps that run."""

    def __init__(self, compute: Compute):
        self._compute = compute
        self.num_steps = 0

    async def run(self, step: Any, *, priority: int = 0) -> Any:
        self.num_steps += 1
        return await self._compute.run(step, priority=priority)

    def close(self) -> None:
        self._compute.close()
