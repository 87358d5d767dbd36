"""A worker's sequence over a fake vLLM: tokens that vLLM reports as not loaded do not count as loaded, and are not
offered again."""

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
    """Answers each request with one token and the next report: the tokens loaded, None for no report."""

    reports: list[int | None]
    requests: list[dict[str, Any] | None] = field(default_factory=list)

    async def generate(
        self, prompt: dict[str, Any], sampling: Any, request_id: str, priority: int
    ) -> AsyncIterator[SimpleNamespace]:
        self.requests.append((sampling.extra_args or {}).get("kv_transfer_params"))
        loaded = self.reports.pop(0)
        report = None if loaded is None else {"loaded_tokens": loaded, "refused": "planted", "ticket": None}
        completion = SimpleNamespace(token_ids=[7], logprobs=[{7: SimpleNamespace(logprob=0.0, rank=1)}])
        yield SimpleNamespace(
            finished=True, outputs=[completion], kv_transfer_params=report, prompt_token_ids=prompt["prompt_token_ids"]
        )

    @property
    def offered(self) -> list[int]:
        """The tokens of the source that each request offered."""
        return [params["load"][0]["num_tokens"] if params and params["load"] else 0 for params in self.requests]


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


async def generate(sequence: TokenSequence) -> list[int]:
    return [token.id async for token in sequence.generate(Sampling(), 1)]


@pytest.mark.parametrize(
    ("reports", "expected", "offered"),
    [
        ([40, 40], [("exact", 40), ("exact", 40)], [40, 40]),
        ([0, 0], [("prefill", 0), ("prefill", 0)], [40, 0]),
        ([32, 32], [("exact", 32), ("exact", 32)], [40, 32]),
        ([40, 32], [("exact", 40), ("exact", 32)], [40, 40]),  # preempted, with its source lost
        ([MIN_LOADED_TOKENS - 1, None], [("prefill", 0), ("prefill", 0)], [40, 0]),
        ([None, None], [("prefill", 0), ("prefill", 0)], [40, 0]),
    ],
)
async def test_reuse_matches_what_vllm_loaded(
    pool: Pool, reports: list[int | None], expected: list[tuple[str, int]], offered: list[int]
) -> None:
    entry = pool.store(IDS[:NUM_STORED], random_kv(0, NUM_STORED), SALT, ttl_s=600)
    llm = ReportingLLM(list(reports))
    sequence = sequence_over(llm)
    with find_reuse(pool, IDS, SALT, KVTransferParams(cache_id=entry.cache_id)) as reuse:
        after_prefill = await page_in(pool, sequence, IDS, reuse)
        assert await generate(sequence) == [7]
        after_decode = reuse.limited(sequence.num_loaded)
    assert [(found.path, found.cached_tokens) for found in (after_prefill, after_decode)] == expected
    assert llm.offered == offered


async def test_prefill_rate_counts_only_prefilled_tokens(pool: Pool) -> None:
    pool.store(IDS[:NUM_STORED], random_kv(0, NUM_STORED), SALT, ttl_s=600)
    for loaded, length in ((0, 0), (32, 32)):
        sequence = sequence_over(ReportingLLM([loaded]))
        with find_reuse(pool, IDS, SALT, KVTransferParams()) as reuse:
            await page_in(pool, sequence, IDS, reuse)
        rates = sequence._engine.rates.by_length("prefill")
        assert list(rates) == ([length] if NUM_PROMPT - length >= 32 else [])
