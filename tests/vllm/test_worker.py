"""A worker over vLLM by its API: as one over transformers, alone and as either side of a mixed pair."""

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

PATIENCE_S = 120  # of a busy machine

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
    engine.llm.engine_core.resources.ctx.destroy(linger=0)  # vLLM leaves it to the collector, which warns


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


async def handed_over(small: ServedWorker, large: ServedWorker) -> str:
    ids = small.prompt()
    read = await small.client.prefill(PrefillRequest(token_ids=ids, tenant_salt=SALT), timeout_s=PATIENCE_S)
    asked = {"num_tokens": len(ids) - TAIL, "native_head": HEAD, "deadline_ms": PATIENCE_S * 1e3}
    return (await large.client.transfer(transfer_request(read.cache_id, **asked), timeout_s=PATIENCE_S)).cache_id


async def test_it_tells_what_it_is_and_answers_as_the_model(large: ServedWorker, folder: Path) -> None:
    info = await large.client.info(timeout_s=10)
    assert info.rates.prefill_tokens_per_s, "measured before anybody asks, and after what is slow at first"
    assert (info.engine, info.layout.block_tokens) == ("vllm", BLOCK_TOKENS)
    expected = tiny.greedy(tiny.reference(folder), large.prompt(), NUM)
    reply = await large.chat(max_tokens=NUM, reuse=False)
    assert content(reply) == large.text(token for token in expected if token not in large.worker.engine.model.eos_ids)
    assert usage(reply).path == "prefill"


async def test_what_was_answered_is_kept_and_found_by_its_tenant_only(large: ServedWorker) -> None:
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


async def test_log_probabilities_and_the_probe(large: ServedWorker) -> None:
    reply = await large.chat(max_tokens=3, logprobs=True, top_logprobs=2, agreement_probe=2)
    told = reply["choices"][0]["logprobs"]["content"]
    assert len(told) == reply["usage"]["completion_tokens"]
    assert logprobs(reply) == pytest.approx([token["top_logprobs"][0]["logprob"] for token in told])
    assert usage(reply).top1_agreement == 1.0


async def test_small_on_transformers_large_on_vllm(
    small_transformers: ServedWorker, large: ServedWorker, folder: Path, small_folder: Path, bundle: Path
) -> None:
    cache_id = await handed_over(small_transformers, large)
    mapped = await large.chat(cache_id=cache_id, max_tokens=NUM)
    assert usage(mapped).path == "mapped"
    ids = large.prompt()
    expected = replay_answer(folder, small_folder, bundle, ids, len(ids) - TAIL, NUM)
    assert content(mapped) == large.text(expected)
    native = await large.chat(max_tokens=NUM, reuse=False)
    assert content(native) == large.text(tiny.greedy(tiny.reference(folder), ids, NUM))
    with pytest.raises(CacheMismatch):
        await large.chat(cache_id=cache_id, require_exact=True)


async def test_a_mapped_cache_that_vllm_could_not_load_made_no_mapped_answer(
    small_transformers: ServedWorker,
    large: ServedWorker,
    folder: Path,
    small_folder: Path,
    bundle: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its blocks are said to have been written since: what vLLM read instead is told, and kept, as read."""
    cache_id, ids, place = await handed_over(small_transformers, large), large.prompt(), vars(PooledKV)["place"].fget
    assert place is not None
    native = large.text(tiny.greedy(tiny.reference(folder), ids, NUM))

    def written_since(source: PooledKV) -> PoolLocation:
        stale: PoolLocation = place(source)
        return replace(stale, generations=tuple(generation + 2 for generation in stale.generations))

    with monkeypatch.context() as planted:
        planted.setattr(PooledKV, "place", property(written_since))
        reply = await large.chat(cache_id=cache_id, max_tokens=NUM)
    told = usage(reply)
    assert (told.path, told.provenance, told.mapped_tokens, told.cached_tokens) == ("prefill", "exact", 0, 0)
    assert content(reply) == native
    kept = await large.chat(cache_id=told.cache_id, max_tokens=NUM)
    assert (usage(kept).path, content(kept)) == ("exact", native)
    mapped = await large.chat(cache_id=cache_id, max_tokens=NUM)
    assert usage(mapped).path == "mapped"
    assert content(mapped) == large.text(replay_answer(folder, small_folder, bundle, ids, len(ids) - TAIL, NUM))


async def test_small_on_vllm_large_on_transformers(folder: Path, small_folder: Path, bundle: Path) -> None:
    async with (
        on_vllm(small_folder, id="small") as small,
        serving(folder, id="large", block_tokens=20, peers={"small": small.app}, bundles=[bundle]) as large,
    ):
        mapped = await large.chat(cache_id=await handed_over(small, large), max_tokens=NUM)
        ids = large.prompt()
        assert usage(mapped).path == "mapped"
        assert content(mapped) == large.text(replay_answer(folder, small_folder, bundle, ids, len(ids) - TAIL, NUM))


async def test_two_ranks_answer_as_one(
    small_transformers: ServedWorker, folder: Path, small_folder: Path, bundle: Path
) -> None:
    ranks = {"tensor_parallel_size": 2}
    peers = {"small": small_transformers.app}
    async with on_vllm(folder, id="ranks", peers=peers, bundles=[bundle], engine_options=ranks) as large:
        ids = large.prompt()
        mapped = await large.chat(cache_id=await handed_over(small_transformers, large), max_tokens=NUM)
        assert usage(mapped).path == "mapped"
        assert content(mapped) == large.text(replay_answer(folder, small_folder, bundle, ids, len(ids) - TAIL, NUM))
        native = await large.chat(max_tokens=NUM, reuse=False)
        assert content(native) == large.text(tiny.greedy(tiny.reference(folder), ids, NUM))


async def test_requests_at_once_keep_to_themselves(large: ServedWorker) -> None:
    alone = [content(await large.chat(TALK[:1] + TALK[1:] * n, max_tokens=NUM, reuse=False)) for n in (1, 2, 3)]
    together = await asyncio.gather(
        *(large.chat(TALK[:1] + TALK[1:] * n, max_tokens=NUM) for n in (1, 2, 3) for _ in range(2))
    )
    assert [content(reply) for reply in together] == [text for text in alone for _ in range(2)]


async def test_a_caller_who_goes_leaves_nothing_running(large: ServedWorker) -> None:
    request = chat_request(max_tokens=600)
    call = asyncio.create_task(large.client.chat(request, timeout_s=PATIENCE_S))
    await until(lambda: large.worker.engine.admission.num_running == 1, PATIENCE_S)
    await asyncio.sleep(0.2)
    call.cancel()
    await asyncio.wait([call])
    await until(lambda: large.worker.engine.admission.num_running == 0, PATIENCE_S)
    assert content(await large.chat(max_tokens=2))


async def test_a_request_that_it_cannot_take_is_refused_by_name(large: ServedWorker) -> None:
    with pytest.raises(InvalidRequest, match="context length"):
        await large.chat(max_tokens=5000)
