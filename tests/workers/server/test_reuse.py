"""Cache reuse: which cached tokens serve a prompt, which are stored, and which must never be used."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForCausalLM

from tests.workers.engines import tiny
from tests.workers.engines.tiny import greedy
from tests.workers.server.support import (
    OTHER_SALT,
    QUESTION,
    SALT,
    SYSTEM,
    TALK,
    ServedWorker,
    chat_request,
    content,
    counts,
    serving,
    until,
)
from workers.api.errors import CacheMismatch, CacheNotFound, DeadlineExceeded, InvalidRequest, Overloaded
from workers.api.schemas import Message, PrefillReply, PrefillRequest, Prompt
from workers.engines.transformers.engine import TransformersSequence

UNKNOWN = "kvc-" + "0" * 32
BLOCK = 32


async def prefill(served: ServedWorker, **changes: Any) -> PrefillReply:
    fields: dict[str, Any] = {"messages": TALK, "stable_messages": 1, "tenant_salt": SALT} | changes
    return await served.client.prefill(PrefillRequest(**fields), timeout_s=60)


def boundary(served: ServedWorker) -> int:
    tokens = served.worker.engine.tokenizer.encode_chat(TALK, stable_messages=1)
    assert tokens.stable_tokens is not None
    return tokens.stable_tokens


async def test_prefix_is_prefilled_once(served: ServedWorker) -> None:
    first = await prefill(served)
    assert (first.num_tokens, first.cached_tokens, first.provenance) == (boundary(served), 0, "exact")
    again = await prefill(served)
    assert again.cached_tokens == boundary(served) // BLOCK * BLOCK
    assert again.digest == first.digest and again.epoch == served.worker.pool.epoch


async def test_queue_time_is_not_prefill_time(folder: Path) -> None:
    waited_s = 0.3
    async with serving(folder, max_running=1) as served:
        began = time.monotonic()
        async with served.worker.engine.admit():
            waiting = asyncio.create_task(prefill(served))
            await until(lambda: served.worker.engine.admission.num_waiting == 1)
            await asyncio.sleep(waited_s)
        prefill_s = (await waiting).prefill_ms / 1000
        assert 0 < prefill_s <= time.monotonic() - began - waited_s
        counted_s = served.worker.metrics.registry.get_sample_value("kvrelay_request_prefill_time_seconds_sum")
        assert counted_s == pytest.approx(prefill_s)


async def test_prefill_without_stable_mark_takes_the_whole_prompt(served: ServedWorker) -> None:
    whole = await prefill(served, stable_messages=None)
    assert whole.num_tokens == len(served.prompt())
    ids = served.prompt()[:50]
    by_ids = await prefill(served, messages=None, stable_messages=None, token_ids=ids)
    assert by_ids.num_tokens == 50
    text = await prefill(served, messages=None, stable_messages=None, prefix="The quick brown fox")
    assert text.num_tokens == len(served.worker.engine.tokenizer.encode("The quick brown fox").token_ids)


async def test_concurrent_equal_prefills_share_one_cache(served: ServedWorker) -> None:
    unblocked, jobs = threading.Event(), served.worker.prefiller._work._jobs
    served.worker.engine.compute.submit(unblocked.wait)
    prefills = [asyncio.create_task(prefill(served)) for _ in range(5)]
    await until(lambda: [job.num_callers for job in jobs.values()] == [5])
    unblocked.set()
    replies = await asyncio.gather(*prefills)
    assert len({reply.cache_id for reply in replies}) == 1
    assert served.worker.pool.stats.num_caches == 1
    other = await prefill(served, tenant_salt=OTHER_SALT)
    assert other.cached_tokens == 0 and other.digest != replies[0].digest


async def test_named_cache_serves_a_prompt_it_begins(served: ServedWorker, reference: LlamaForCausalLM) -> None:
    cache = await prefill(served)
    reply = await served.chat(cache_id=cache.cache_id)
    usage = reply["kv_transfer_params"]
    assert content(reply) == served.text(greedy(reference, served.prompt(), 8))
    assert (usage["path"], usage["cached_tokens"], usage["mapped_tokens"]) == ("exact", cache.num_tokens, 0)
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == cache.num_tokens


async def test_prefix_is_matched_without_cache_id(served: ServedWorker, reference: LlamaForCausalLM) -> None:
    await prefill(served)
    other = [SYSTEM, Message(role="user", content="東京は日本の首都です。 And the dog?")]
    reply = await served.chat(other)
    assert reply["kv_transfer_params"]["cached_tokens"] == boundary(served) // BLOCK * BLOCK
    assert content(reply) == served.text(greedy(reference, served.prompt(other), 8))


async def test_num_tokens_caps_reuse(served: ServedWorker) -> None:
    cache = await prefill(served)
    assert (await served.chat(cache_id=cache.cache_id, num_tokens=17))["kv_transfer_params"]["cached_tokens"] == 17


async def test_cache_is_reused_up_to_the_first_difference(served: ServedWorker, reference: LlamaForCausalLM) -> None:
    cache = await prefill(served)
    other = [Message(role="system", content=SYSTEM.text[:40] + "but a dog does not."), QUESTION]
    reply = await served.chat(other, cache_id=cache.cache_id)
    assert 0 < reply["kv_transfer_params"]["cached_tokens"] < cache.num_tokens
    assert content(reply) == served.text(greedy(reference, served.prompt(other), 8))


async def test_at_least_one_token_is_prefilled(served: ServedWorker, reference: LlamaForCausalLM) -> None:
    whole = await prefill(served, stable_messages=None)
    reply = await served.chat(cache_id=whole.cache_id)
    assert reply["kv_transfer_params"]["cached_tokens"] == whole.num_tokens - 1
    assert content(reply) == served.text(greedy(reference, served.prompt(), 8))


async def test_next_turn_reuses_prompt_and_answer(served: ServedWorker, reference: LlamaForCausalLM) -> None:
    first = await served.chat()
    usage = first["kv_transfer_params"]
    assert usage["num_tokens"] == len(served.prompt()) + 8 - 1  # the last generated token has no KV
    talk = [*TALK, Message(role="assistant", content=content(first)), QUESTION]
    second = await served.chat(talk, cache_id=usage["cache_id"])
    assert second["kv_transfer_params"]["cached_tokens"] > len(served.prompt()) - 2
    assert content(second) == served.text(greedy(reference, served.prompt(talk), 8))


async def test_cache_info_matches_usage_until_dropped(served: ServedWorker) -> None:
    usage = (await served.chat())["kv_transfer_params"]
    info = await served.client.cache(usage["cache_id"])
    assert (info.num_tokens, info.digest, info.provenance) == (usage["num_tokens"], usage["digest"], "exact")
    await served.client.drop(usage["cache_id"])
    with pytest.raises(CacheNotFound):
        await served.client.cache(usage["cache_id"])


async def test_store_and_reuse_can_be_switched_off(served: ServedWorker) -> None:
    usage = (await served.chat(store=False))["kv_transfer_params"]
    assert usage["cache_id"] is None and served.worker.pool.stats.num_caches == 0
    await served.chat()
    assert (await served.chat(reuse=False))["kv_transfer_params"]["path"] == "prefill"
    assert (await served.chat())["kv_transfer_params"]["path"] == "exact"


async def test_caches_are_not_shared_across_tenants(served: ServedWorker) -> None:
    cache = await prefill(served)
    with pytest.raises(CacheMismatch, match="another tenant"):
        await served.chat(cache_id=cache.cache_id, tenant_salt=OTHER_SALT)
    reply = await served.chat(tenant_salt=OTHER_SALT)
    assert reply["kv_transfer_params"]["path"] == "prefill"


async def test_missing_cache_is_not_replaced_by_another(served: ServedWorker) -> None:
    await prefill(served)
    with pytest.raises(CacheNotFound, match=UNKNOWN):
        await served.chat(cache_id=UNKNOWN)


async def test_cache_without_common_first_token_is_rejected(served: ServedWorker) -> None:
    ids = [7, *served.prompt()[:40]]
    cache = await prefill(served, messages=None, stable_messages=None, token_ids=ids)
    with pytest.raises(CacheMismatch, match="differ in their first token"):
        await served.chat(cache_id=cache.cache_id)


async def test_full_pool_does_not_fail_the_answer(served: ServedWorker) -> None:
    pool = served.worker.pool
    with pool.allocate(pool.stats.num_blocks):
        reply = await served.chat()
        assert content(reply) and reply["kv_transfer_params"]["cache_id"] is None
        with pytest.raises(Overloaded) as error:
            await prefill(served)
        assert error.value.retry_after_s
    assert await counts(served, "cache_store_failures_total") == {"pool_full": 1}


async def test_late_kv_fetch_does_not_fail_the_answer(served: ServedWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    async def too_late(sequence: TransformersSequence, begin: int) -> None:
        raise DeadlineExceeded("planted")

    monkeypatch.setattr(TransformersSequence, "fetch", too_late)
    reply = await served.chat()
    assert content(reply) and reply["kv_transfer_params"]["cache_id"] is None
    assert await counts(served, "cache_store_failures_total") == {"deadline_exceeded": 1}


async def test_stable_messages_beyond_the_prompt_are_rejected(served: ServedWorker) -> None:
    with pytest.raises(InvalidRequest, match="there are 2 messages"):
        await served.chat(stable_messages=3)
    assert (await served.chat(stable_messages=1))["kv_transfer_params"]["stable_tokens"] == boundary(served)


async def test_messages_that_cannot_be_rendered_alone_have_no_stable_prefix(tmp_path: Path) -> None:
    async with serving(tiny.model_folder(tmp_path / "strict", template="strict")) as served:
        with pytest.raises(InvalidRequest, match="no stable tokens") as error:
            await prefill(served)
        assert error.value.param == "stable_messages"
        assert (await served.chat(stable_messages=1))["kv_transfer_params"]["stable_tokens"] is None


async def test_stream_reports_the_stored_cache(served: ServedWorker) -> None:
    request = chat_request(stream=True)
    parts = [part async for parts in served.client.chat_stream(request, timeout_s=60) for part in parts]
    usage = parts[-1]["kv_transfer_params"]
    assert (await served.client.cache(usage["cache_id"])).num_tokens == usage["num_tokens"]


async def test_tokenize_returns_the_stable_boundary(served: ServedWorker) -> None:
    reply = await served.client.tokenize(Prompt(messages=TALK, stable_messages=1))
    assert (reply.token_ids, reply.stable_tokens) == (served.prompt(), boundary(served))
