"""A worker over vLLM through its API: like one over transformers, alone and on either side of a mixed pair."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.vllm.conftest import BLOCK_TOKENS
from tests.workers.engines import tiny
from tests.workers.server.support import (
    OTHER_SALT,
    SALT,
    TALK,
    ServedWorker,
    chat_request,
    content,
    serving,
    transfer_request,
    until,
)
from tests.workers.server.test_mapped import HEAD, NUM, TAIL, replay_answer
from workers.api.errors import CacheMismatch, InvalidRequest
from workers.api.schemas import KVUsage, PrefillRequest
from workers.engines.base import PoolLocation
from workers.serving.reuse import PooledKV

TIMEOUT_S = 120  # for a busy machine

pytestmark = [
    pytest.mark.usefixtures("installed"),
    pytest.mark.filterwarnings("default"),  # vLLM's own
    pytest.mark.asyncio(loop_scope="module"),
]


@asynccontextmanager
async def on_vllm(folder: Path, **changes: Any) -> AsyncIterator[ServedWorker]:
    async with serving(folder, engine="vllm", block_tokens=BLOCK_TOKENS, pool_bytes=2**24, **changes) as served:
        yield served
    engine: Any = served.worker.engine
    engine.llm.engine_core.resources.ctx.destroy(linger=0)  # vLLM leaves it to the garbage collector, which warns


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def small_transformers(small_folder: Path) -> AsyncIterator[ServedWorker]:
    async with serving(small_folder, id="small", block_tokens=20) as served:
        yield served


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def large(
    installed: None, folder: Path, bundle: Path, small_transformers: ServedWorker
) -> AsyncIterator[ServedWorker]:
    async with on_vllm(folder, id="large", peers={"small": small_transformers.app}, bundles=[bundle]) as served:
        yield served


def usage(reply: dict[str, Any]) -> KVUsage:
    return KVUsage.model_validate(reply["kv_transfer_params"])


def logprobs(reply: dict[str, Any]) -> list[float]:
    return [token["logprob"] for token in reply["choices"][0]["logprobs"]["content"]]


async def hand_over(small: ServedWorker, large: ServedWorker) -> str:
    ids = small.prompt()
    prefilled = await small.client.prefill(PrefillRequest(token_ids=ids, tenant_salt=SALT), timeout_s=TIMEOUT_S)
    fields = {"num_tokens": len(ids) - TAIL, "native_head": HEAD, "deadline_ms": TIMEOUT_S * 1e3}
    return (await large.client.transfer(transfer_request(prefilled.cache_id, **fields), timeout_s=TIMEOUT_S)).cache_id


async def test_info_and_answer_match_the_model(large: ServedWorker, folder: Path) -> None:
    info = await large.client.info(timeout_s=10)
    assert info.rates.prefill_tokens_per_s, "rates are measured during warm-up, after the slow first steps"
    assert (info.engine, info.layout.block_tokens) == ("vllm", BLOCK_TOKENS)
    expected = tiny.greedy(tiny.reference(folder), large.prompt(), NUM)
    reply = await large.chat(max_tokens=NUM, reuse=False)
    assert content(reply) == large.text(token for token in expected if token not in large.worker.engine.model.eos_ids)
    assert usage(reply).path == "prefill"


async def test_answer_is_cached_for_its_tenant_only(large: ServedWorker) -> None:
    first = await large.chat(max_tokens=NUM, logprobs=True, reuse=False)
    again = await large.chat(max_tokens=NUM, logprobs=True, cache_id=usage(first).cache_id)
    assert usage(again).path == "exact"
    assert usage(again).cached_tokens == len(large.prompt()) - 1
    assert logprobs(again) == pytest.approx(logprobs(first), abs=1e-4)
    assert content(again) == content(first)
    assert usage(await large.chat(max_tokens=1)).cached_tokens >= BLOCK_TOKENS
    assert usage(await large.chat(max_tokens=1, tenant_salt=OTHER_SALT)).cached_tokens == 0
    with pytest.raises(CacheMismatch):
        await large.chat(cache_id=usage(first).cache_id, tenant_salt=OTHER_SALT)


async def test_logprobs_and_probe_match_the_answer(large: ServedWorker) -> None:
    reply = await large.chat(max_tokens=3, logprobs=True, top_logprobs=2, agreement_probe=2)
    entries = reply["choices"][0]["logprobs"]["content"]
    assert len(entries) == reply["usage"]["completion_tokens"]
    assert logprobs(reply) == pytest.approx([entry["top_logprobs"][0]["logprob"] for entry in entries])
    assert usage(reply).top1_agreement == 1.0


async def test_handoff_from_transformers_to_vllm_matches_replay(
    small_transformers: ServedWorker, large: ServedWorker, folder: Path, small_folder: Path, bundle: Path
) -> None:
    cache_id = await hand_over(small_transformers, large)
    mapped = await large.chat(cache_id=cache_id, max_tokens=NUM)
    assert usage(mapped).path == "mapped"
    ids = large.prompt()
    expected = replay_answer(folder, small_folder, bundle, ids, len(ids) - TAIL, NUM)
    assert content(mapped) == large.text(expected)
    native = await large.chat(max_tokens=NUM, reuse=False)
    assert content(native) == large.text(tiny.greedy(tiny.reference(folder), ids, NUM))
    with pytest.raises(CacheMismatch):
        await large.chat(cache_id=cache_id, require_exact=True)


async def test_mapped_cache_that_vllm_could_not_load_gives_an_exact_answer(
    small_transformers: ServedWorker,
    large: ServedWorker,
    folder: Path,
    small_folder: Path,
    bundle: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its generations are stale: the report and the stored cache say that vLLM prefilled the tokens."""
    cache_id, ids = await hand_over(small_transformers, large), large.prompt()
    location = vars(PooledKV)["location"].fget
    assert location is not None
    native = large.text(tiny.greedy(tiny.reference(folder), ids, NUM))

    def stale_location(source: PooledKV) -> PoolLocation:
        stale: PoolLocation = location(source)
        return replace(stale, generations=tuple(generation + 2 for generation in stale.generations))

    with monkeypatch.context() as planted:
        planted.setattr(PooledKV, "location", property(stale_location))
        reply = await large.chat(cache_id=cache_id, max_tokens=NUM)
    report = usage(reply)
    assert (report.path, report.provenance, report.mapped_tokens, report.cached_tokens) == ("prefill", "exact", 0, 0)
    assert content(reply) == native
    kept = await large.chat(cache_id=report.cache_id, max_tokens=NUM)
    assert (usage(kept).path, content(kept)) == ("exact", native)
    mapped = await large.chat(cache_id=cache_id, max_tokens=NUM)
    assert usage(mapped).path == "mapped"
    assert content(mapped) == large.text(replay_answer(folder, small_folder, bundle, ids, len(ids) - TAIL, NUM))


async def test_handoff_from_vllm_to_transformers_matches_replay(folder: Path, small_folder: Path, bundle: Path) -> None:
    async with (
        on_vllm(small_folder, id="small") as small,
        serving(folder, id="large", block_tokens=20, peers={"small": small.app}, bundles=[bundle]) as large,
    ):
        mapped = await large.chat(cache_id=await hand_over(small, large), max_tokens=NUM)
        ids = large.prompt()
        assert usage(mapped).path == "mapped"
        assert content(mapped) == large.text(replay_answer(folder, small_folder, bundle, ids, len(ids) - TAIL, NUM))


async def test_two_ranks_answer_like_one(
    small_transformers: ServedWorker, folder: Path, small_folder: Path, bundle: Path
) -> None:
    ranks = {"tensor_parallel_size": 2}
    peers = {"small": small_transformers.app}
    async with on_vllm(folder, id="ranks", peers=peers, bundles=[bundle], engine_options=ranks) as large:
        ids = large.prompt()
        mapped = await large.chat(cache_id=await hand_over(small_transformers, large), max_tokens=NUM)
        assert usage(mapped).path == "mapped"
        assert content(mapped) == large.text(replay_answer(folder, small_folder, bundle, ids, len(ids) - TAIL, NUM))
        native = await large.chat(max_tokens=NUM, reuse=False)
        assert content(native) == large.text(tiny.greedy(tiny.reference(folder), ids, NUM))


async def test_concurrent_requests_do_not_mix(large: ServedWorker) -> None:
    alone = [content(await large.chat(TALK[:1] + TALK[1:] * n, max_tokens=NUM, reuse=False)) for n in (1, 2, 3)]
    together = await asyncio.gather(
        *(large.chat(TALK[:1] + TALK[1:] * n, max_tokens=NUM) for n in (1, 2, 3) for _ in range(2))
    )
    assert [content(reply) for reply in together] == [text for text in alone for _ in range(2)]


async def test_disconnect_stops_the_request(large: ServedWorker) -> None:
    request = chat_request(max_tokens=600)
    call = asyncio.create_task(large.client.chat(request, timeout_s=TIMEOUT_S))
    await until(lambda: large.worker.engine.admission.num_running == 1, TIMEOUT_S)
    await asyncio.sleep(0.2)
    call.cancel()
    await asyncio.wait([call])
    await until(lambda: large.worker.engine.admission.num_running == 0, TIMEOUT_S)
    assert content(await large.chat(max_tokens=2))


async def test_too_long_request_is_rejected_with_its_reason(large: ServedWorker) -> None:
    with pytest.raises(InvalidRequest, match="context length"):
        await large.chat(max_tokens=5000)
