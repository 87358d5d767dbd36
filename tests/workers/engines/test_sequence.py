"""Sequences against transformers itself: the same tokens, the same KV, however they are cut into steps."""

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
class Copied:
    """KV that a function copies into the sequence's views."""

    copy: Callable[[KVCache], None]

    def __call__(self, views: KVCache, /) -> None:
        self.copy(views)

    @property
    def place(self) -> PoolLocation:
        raise NotImplementedError


def difference(left: KVCache, right: KVCache) -> float:
    pairs = zip(left.keys + left.values, right.keys + right.values, strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


async def written(sequence: TokenSequence, num_tokens: int, sampling: Sampling | None = None) -> list[int]:
    return [token.id async for token in sequence.generate(sampling or Sampling(), num_tokens)]


@pytest.mark.parametrize("num_tokens", [1, 2, CHUNK_TOKENS, CHUNK_TOKENS + 1, 3 * CHUNK_TOKENS - 5])
async def test_reading_in_chunks_equals_reading_at_once(
    engine: Engine, reference: LlamaForCausalLM, num_tokens: int
) -> None:
    ids = random_tokens(num_tokens)
    async with engine.sequence(CLAIM, num_tokens) as sequence:
        await sequence.read(ids)
        assert sequence.token_ids == ids
        assert difference(sequence.kv(0, num_tokens), prefill(reference, ids)) < TOLERANCE


@pytest.mark.parametrize("num_tokens", [1, 40, 300])
async def test_greedy_tokens_are_those_of_generate(
    engine: Engine, reference: LlamaForCausalLM, num_tokens: int
) -> None:
    prompt = random_tokens(num_tokens, seed=3)
    expected = greedy(reference, prompt, 24)
    async with engine.sequence(CLAIM, num_tokens + 24) as sequence:
        await sequence.read(prompt)
        assert await written(sequence, len(expected)) == expected


async def test_log_probabilities_are_those_of_the_model(engine: Engine, reference: LlamaForCausalLM) -> None:
    prompt = random_tokens(30)
    logprobs = reference(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
    values, ids = logprobs.topk(3)
    async with engine.sequence(CLAIM, 40) as sequence:
        await sequence.read(prompt)
        async for token in sequence.generate(Sampling(temperature=0.7, top_p=0.5, seed=1, num_top=3), 1):
            assert [i for i, _ in token.top] == ids.tolist()
            assert [p for _, p in token.top] == pytest.approx(values.tolist(), abs=TOLERANCE)
            assert token.logprob == pytest.approx(float(logprobs[token.id]), abs=TOLERANCE)


async def test_loaded_kv_stands_for_tokens_that_were_read(engine: Engine, reference: LlamaForCausalLM) -> None:
    prompt, cut = random_tokens(90), 61
    known = prefill(reference, prompt[:cut])

    def source(views: KVCache) -> None:
        for view, tensor in zip(views.keys + views.values, known.keys + known.values, strict=True):
            view.copy_(tensor)

    async with engine.sequence(CLAIM, 100) as sequence:
        await sequence.load(prompt[:cut], Copied(source))
        await sequence.read(prompt[cut:])
        assert difference(sequence.kv(0, 90), prefill(reference, prompt)) < TOLERANCE
        assert await written(sequence, 8) == greedy(reference, prompt, 8)
        with pytest.raises(ValueError, match="must be empty"):
            await sequence.load(prompt, Copied(source))


async def test_what_is_loaded_is_attended_over(engine: Engine, reference: LlamaForCausalLM) -> None:
    prompt = random_tokens(40)

    def zeros(views: KVCache) -> None:
        for view in views.keys + views.values:
            view.zero_()

    async with engine.sequence(CLAIM, 40) as sequence:
        await sequence.load(prompt[:30], Copied(zeros))
        await sequence.read(prompt[30:])
        assert difference(sequence.kv(30, 40), prefill(reference, prompt).slice(30, 40)) > 0.01


async def test_memory_grows_beyond_its_capacity(engine: Engine, reference: LlamaForCausalLM) -> None:
    prompt = random_tokens(50)
    async with engine.sequence(CLAIM, 4) as sequence:
        await sequence.read(prompt)
        assert await written(sequence, 16) == greedy(reference, prompt, 16)


def test_memory_grows_ahead_of_need_but_not_beyond_the_context() -> None:
    memory = WorkingMemory(KVGeometry(1, 1, 2), 60, dtype=torch.float32, device=torch.device("cpu"), limit=100)
    sizes = []
    for num_tokens in (60, 61, 91, 100):
        memory.reserve(num_tokens)
        sizes.append(memory.capacity)
    assert sizes == [60, 90, 100, 100]


def test_freed_memory_leaves_its_room_without_the_collector() -> None:
    rooms = BufferPool()

    def made() -> WorkingMemory:
        device = torch.device("cpu")
        return WorkingMemory(KVGeometry(2, 4, 64), 1024, dtype=torch.float32, device=device, rooms=rooms)

    gc.disable()  # the memory and its layers are a cycle, which only the collector undoes
    try:
        memory = made()
        at, view = memory.kv(0, 1).keys[0].data_ptr(), memory.kv(0, 4)
        memory.free()
        assert made().kv(0, 1).keys[0].data_ptr() != at, "somebody still looks into it"
        del view
        assert made().kv(0, 1).keys[0].data_ptr() == at
    finally:
        gc.enable()


async def test_a_sequence_that_ends_frees_its_memory(engine: TransformersEngine) -> None:
    async with engine.sequence(CLAIM, 40) as sequence:
        await sequence.read(random_tokens(30))
        assert isinstance(sequence, TransformersSequence) and sequence.memory.capacity == 40
    assert sequence.memory.capacity == 0


async def test_truncated_tokens_are_forgotten(engine: Engine, reference: LlamaForCausalLM) -> None:
    prompt, other = random_tokens(50), random_tokens(20, seed=9)
    async with engine.sequence(CLAIM, 100) as sequence:
        await sequence.read(prompt)
        sequence.truncate(30)
        await sequence.read(other)
        assert difference(sequence.kv(0, 50), prefill(reference, prompt[:30] + other)) < TOLERANCE


async def test_predictions_are_the_models_own(engine: Engine, reference: LlamaForCausalLM) -> None:
    prompt = random_tokens(300)
    expected = reference(torch.tensor([prompt])).logits[0].argmax(-1).tolist()
    async with engine.sequence(CLAIM, 300) as sequence:
        assert await sequence.predict(prompt) == expected


async def test_a_token_can_only_follow_another(engine: Engine) -> None:
    async with engine.sequence(CLAIM, 4) as sequence:
        with pytest.raises(ValueError, match="nothing was read"):
            await written(sequence, 1)


async def test_seeded_sampling_repeats_itself(engine: Engine) -> None:
    async def draw(seed: int) -> list[int]:
        async with engine.sequence(CLAIM, 64) as sequence:
            await sequence.read(random_tokens(20))
            return await written(sequence, 16, Sampling(temperature=1.5, seed=seed))

    first = await draw(1)
    assert await draw(1) == first
    assert await draw(2) != first


async def test_a_narrow_top_p_is_greedy(engine: Engine, reference: LlamaForCausalLM) -> None:
    prompt = random_tokens(20)
    async with engine.sequence(CLAIM, 64) as sequence:
        await sequence.read(prompt)
        sampling = Sampling(temperature=1.0, top_p=1e-6, seed=0)
        assert await written(sequence, 8, sampling) == greedy(reference, prompt, 8)


async def test_a_temperature_too_small_to_divide_by_is_greedy(engine: Engine, reference: LlamaForCausalLM) -> None:
    prompt = random_tokens(20)
    async with engine.sequence(CLAIM, 64) as sequence:
        await sequence.read(prompt)
        assert await written(sequence, 8, Sampling(temperature=1e-40)) == greedy(reference, prompt, 8)


async def test_an_answer_that_cannot_go_on_does_not_end_the_others(
    engine: Engine, reference: LlamaForCausalLM
) -> None:
    prompts = [random_tokens(n, seed=n) for n in (10, 30)]
    async with engine.sequence(CLAIM, 64) as good, engine.sequence(CLAIM, 64) as bad:
        await good.read(prompts[0])
        await bad.read(prompts[1])
        bad.kv(0, 30).values[0].fill_(torch.nan)
        drawn = written(bad, 8, Sampling(temperature=1.0))
        told, failed = await asyncio.gather(written(good, 8), drawn, return_exceptions=True)
    assert told == greedy(reference, prompts[0], 8)
    assert isinstance(failed, RuntimeError)


async def test_draws_follow_the_temperature(engine: Engine, reference: LlamaForCausalLM) -> None:
    prompt, temperature, draws = random_tokens(20), 0.8, 400
    expected = (reference(torch.tensor([prompt])).logits[0, -1] / temperature).softmax(-1)
    likely = int(expected.argmax())
    hits = 0
    async with engine.sequence(CLAIM, 64) as sequence:
        await sequence.read(prompt)
        for seed in range(draws):
            hits += await written(sequence, 1, Sampling(temperature=temperature, seed=seed)) == [likely]
    share, spread = float(expected[likely]), float((expected[likely] * (1 - expected[likely]) / draws) ** 0.5)
    assert abs(hits / draws - share) < 4 * spread


async def test_concurrent_sequences_do_not_touch_each_other(engine: Engine, reference: LlamaForCausalLM) -> None:
    prompts = [random_tokens(n, seed=n) for n in (10, 130, 300, 520)]

    async def answer(prompt: list[int]) -> list[int]:
        async with engine.sequence(CLAIM, 600) as sequence:
            await sequence.read(prompt)
            return await written(sequence, 10)

    answers = await asyncio.gather(*(answer(prompt) for prompt in prompts))
    for prompt, got in zip(prompts, answers, strict=True):
        expected = greedy(reference, prompt, 10)
        assert got[: len(expected)] == expected


async def test_no_step_begins_after_the_deadline(engine: Engine) -> None:
    async with engine.sequence(Claim(deadline=time.monotonic() - 1), 10) as sequence:
        with pytest.raises(DeadlineExceeded):
            await sequence.read(random_tokens(10))
        assert sequence.num_tokens == 0


async def test_a_cancelled_reader_stops_within_one_chunk(engine: Engine) -> None:
    async with engine.sequence(CLAIM, 1000) as sequence:
        reading = asyncio.create_task(sequence.read(random_tokens(1000)))
        await asyncio.sleep(0)
        await engine.compute.run(lambda: None)  # runs behind the first chunk
        reading.cancel()
        await asyncio.wait([reading])
        reached = sequence.num_tokens
        assert reading.cancelled() and CHUNK_TOKENS <= reached <= 2 * CHUNK_TOKENS
        await engine.compute.run(lambda: None)
        assert sequence.num_tokens == reached


async def test_rates_are_measured(engine: Engine) -> None:
    assert engine.rates.snapshot().prefill_tokens_per_s is None
    async with engine.sequence(CLAIM, 100) as sequence:
        await sequence.read(random_tokens(64))
        await written(sequence, 4)
    rates = engine.rates.snapshot()
    assert rates.prefill_tokens_per_s and rates.decode_tokens_per_s


async def test_answers_go_on_in_rounds_and_are_the_same_as_alone(engine: Engine) -> None:
    prompts, num_tokens = [random_tokens(n, seed=n) for n in (9, 40, 41, 150, 300)], 12

    async def answer(prompt: list[int]) -> list[tuple[int, float]]:
        async with engine.sequence(CLAIM, 400) as sequence:
            await sequence.read(prompt)
            return [(token.id, token.logprob) async for token in sequence.generate(Sampling(), num_tokens)]

    alone = [await answer(prompt) for prompt in prompts]
    engine.compute = counted = CountedCompute(engine.compute)  # type: ignore[assignment]
    assert await asyncio.gather(*(answer(prompt) for prompt in prompts)) == alone
    assert counted.num_steps < len(prompts) * num_tokens / 2


async def test_an_answer_goes_on_between_the_chunks_of_a_long_prompt(engine: Engine) -> None:
    num_tokens = 40
    async with engine.sequence(CLAIM, 100) as writing, engine.sequence(CLAIM, 1000) as reading:
        await writing.read(random_tokens(10))
        tokens = writing.generate(Sampling(), num_tokens)
        await anext(tokens)
        task = asyncio.create_task(reading.read(random_tokens(1000)))
        at_each = [reading.num_tokens async for _ in tokens]
        await task
    assert len({1 * CHUNK_TOKENS, 2 * CHUNK_TOKENS, 3 * CHUNK_TOKENS} & set(at_each)) >= 2


class CountedCompute:
    """Counts the steps."""

    def __init__(self, compute: Compute):
        self._compute = compute
        self.num_steps = 0

    async def run(self, step: Any, *, priority: int = 0) -> Any:
        self.num_steps += 1
        return await self._compute.run(step, priority=priority)

    def close(self) -> None:
        self._compute.close()
