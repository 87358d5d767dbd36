"""A worker's sequence over a vLLM that reports what it did: what it could not load is not taken for loaded, and is not
asked for again. vLLM's place is taken by plain values."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from tests.workers.pool.support import LAYOUT, SALT, make_arena, random_kv
from workers.api.schemas import KVTransferParams
from workers.engines.base import MIN_LOADED_TOKENS, ModelInfo, Sampling, TokenSequence
from workers.engines.scheduling import Admission, Claim, Compute
from workers.pool.pool import Pool
from workers.serving.reuse import find_reuse, page_in

FINGERPRINT = "51" * 32
NUM_STORED, NUM_PROMPT = 40, 60
IDS = list(range(3, 3 + NUM_PROMPT))

pytestmark = [
    pytest.mark.usefixtures("installed"),
    pytest.mark.filterwarnings("default"),  # vLLM's own
]


@dataclass
class ReportingLLM:
    """Each request is answered with one token and the next report: the tokens loaded, None for no report at all."""

    reports: list[int | None]
    asked: list[dict[str, Any] | None] = field(default_factory=list)

    async def generate(
        self, prompt: dict[str, Any], sampling: Any, request_id: str, priority: int
    ) -> AsyncIterator[SimpleNamespace]:
        self.asked.append((sampling.extra_args or {}).get("kv_transfer_params"))
        loaded = self.reports.pop(0)
        told = None if loaded is None else {"loaded_tokens": loaded, "refused": "planted", "ticket": None}
        written = SimpleNamespace(token_ids=[7], logprobs=[{7: SimpleNamespace(logprob=0.0, rank=1)}])
        yield SimpleNamespace(
            finished=True, outputs=[written], kv_transfer_params=told, prompt_token_ids=prompt["prompt_token_ids"]
        )

    @property
    def offered(self) -> list[int]:
        """How many tokens each request named a source for."""
        return [asked["load"][0]["num_tokens"] if asked and asked["load"] else 0 for asked in self.asked]


@pytest.fixture
async def pool(tmp_path: Any) -> AsyncIterator[Pool]:
    pool = Pool(make_arena("shm", tmp_path), FINGERPRINT)
    yield pool
    pool.close()


def sequence_over(llm: ReportingLLM) -> Any:
    from workers.engines.vllm.engine import VllmEngine, VllmSequence

    info = ModelInfo("m", FINGERPRINT, LAYOUT, 512, 400, frozenset(), "cpu")
    engine = VllmEngine(llm, info, None, Admission(max_running=1, max_waiting=1), Compute())  # type: ignore[arg-type]
    return VllmSequence(engine, Claim())


async def written(sequence: TokenSequence) -> list[int]:
    return [token.id async for token in sequence.generate(Sampling(), 1)]


@pytest.mark.parametrize(
    ("reports", "told", "offered"),
    [
        ([40, 40], [("exact", 40), ("exact", 40)], [40, 40]),
        ([0, 0], [("prefill", 0), ("prefill", 0)], [40, 0]),
        ([32, 32], [("exact", 32), ("exact", 32)], [40, 32]),
        ([40, 32], [("exact", 40), ("exact", 32)], [40, 40]),  # it was preempted, and its source had gone
        ([MIN_LOADED_TOKENS - 1, None], [("prefill", 0), ("prefill", 0)], [40, 0]),
        ([None, None], [("prefill", 0), ("prefill", 0)], [40, 0]),
    ],
)
async def test_an_answer_is_of_what_vllm_reports(
    pool: Pool, reports: list[int | None], told: list[tuple[str, int]], offered: list[int]
) -> None:
    entry = pool.store(IDS[:NUM_STORED], random_kv(0, NUM_STORED), SALT, ttl_s=600)
    llm = ReportingLLM(list(reports))
    sequence = sequence_over(llm)
    with find_reuse(pool, IDS, SALT, KVTransferParams(cache_id=entry.cache_id)) as reuse:
        after_reading = await page_in(pool, sequence, IDS, reuse)
        assert await written(sequence) == [7]
        after_writing = reuse.cut(sequence.num_loaded)
    assert [(found.path, found.cached_tokens) for found in (after_reading, after_writing)] == told
    assert llm.offered == offered


async def test_the_rate_of_reading_is_that_of_what_was_read(pool: Pool) -> None:
    pool.store(IDS[:NUM_STORED], random_kv(0, NUM_STORED), SALT, ttl_s=600)
    for loaded, length in ((0, 0), (32, 32)):
        sequence = sequence_over(ReportingLLM([loaded]))
        with find_reuse(pool, IDS, SALT, KVTransferParams()) as reuse:
            await page_in(pool, sequence, IDS, reuse)
        rates = sequence._engine.rates.by_length("prefill")
        assert list(rates) == ([length] if NUM_PROMPT - length >= 32 else [])
