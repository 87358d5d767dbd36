"""What of the pool serves which prompt, what is kept, and what may never be used."""

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
    Served,
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


async def prefilled(served: Served, **changes: Any) -> PrefillReply:
    fields: dict[str, Any] = {"messages": TALK, "stable_messages": 1, "tenant_salt": SALT} | changes
    return await served.client.prefill(PrefillRequest(**fields), timeout_s=60)


def boundary(served: Served) -> int:
    tokens = served.worker.engine.tokenizer.encode_chat(TALK, stable_messages=1)
    assert tokens.stable_tokens is not None
    return tokens.stable_tokens


async def test_a_prefix_is_read_once(served: Served) -> None:
    first = await prefilled(served)
    assert (first.num_tokens, first.cached_tokens, first.provenance) == (boundary(served), 0, "exact")
    again = await prefilled(served)
    assert again.cached_tokens == boundary(served) // BLOCK * BLOCK
    assert again.digest == first.digest and again.epoch == served.worker.pool.epoch


async def test_waiting_for_a_place_is_no_prefill(folder: Path) -> None:
    waited_s = 0.3
    async with serving(folder, max_running=1) as served:
        began = time.monotonic()
        async with served.worker.engine.admit():
            reading = asyncio.create_task(prefilled(served))
            await until(lambda: served.worker.engine.admission.num_waiting == 1)
            await asyncio.sleep(waited_s)
        prefill_s = (await reading).prefill_ms / 1000
        assert 0 < prefill_s <= time.monotonic() - began - waited_s
        counted_s = served.worker.metrics.registry.get_sample_value("kvrelay_request_prefill_time_seconds_sum")
        assert counted_s == pytest.approx(prefill_s)


async def test_without_a_mark_everything_given_is_read(served: Served) -> None:
    whole = await prefilled(served, stable_messages=None)
    assert whole.num_tokens == len(served.prompt())
    ids = served.prompt()[:50]
    by_ids = await prefilled(served, messages=None, stable_messages=None, token_ids=ids)
    assert by_ids.num_tokens == 50
    text = await prefilled(served, messages=None, stable_messages=None, prefix="The quick brown fox")
    assert text.num_tokens == len(served.worker.engine.tokenizer.encode("The quick brown fox").token_ids)


async def test_equal_prefills_at_once_are_one(served: Served) -> None:
    unblocked, jobs = threading.Event(), served.worker.prefiller._work._jobs
    served.worker.engine.compute.submit(unblocked.wait)
    prefills = [asyncio.create_task(prefilled(served)) for _ in range(5)]
    await until(lambda: [job.num_callers for job in jobs.values()] == [5])
    unblocked.set()
    replies = await asyncio.gather(*prefills)
    assert len({reply.cache_id for reply in replies}) == 1
    assert served.worker.pool.stats.num_caches == 1
    other = await prefilled(served, tenant_salt=OTHER_SALT)
    assert other.cached_tokens == 0 and other.digest != replies[0].digest


async def test_a_named_cache_serves_the_prompt_it_begins(served: Served, reference: LlamaForCausalLM) -> None:
    cache = await prefilled(served)
    reply = await served.chat(cache_id=cache.cache_id)
    usage = reply["kv_transfer_params"]
    assert content(reply) == served.text(greedy(reference, served.prompt(), 8))
    assert (usage["path"], usage["cached_tokens"], usage["mapped_tokens"]) == ("exact", cache.num_tokens, 0)
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == cache.num_tokens


async def test_prefixes_are_found_without_a_name(served: Served, reference: LlamaForCausalLM) -> None:
    await prefilled(served)
    other = [SYSTEM, Message(role="user", content="東京は日本の首都です。 And the dog?")]
    reply = await served.chat(other)
    assert reply["kv_transfer_params"]["cached_tokens"] == boundary(served) // BLOCK * BLOCK
    assert content(reply) == served.text(greedy(reference, served.prompt(other), 8))


async def test_a_cap_on_what_is_used(served: Served) -> None:
    cache = await prefilled(served)
    assert (await served.chat(cache_id=cache.cache_id, num_tokens=17))["kv_transfer_params"]["cached_tokens"] == 17


async def test_a_cache_is_used_as_far_as_it_agrees_with_the_prompt(
    served: Served, reference: LlamaForCausalLM
) -> None:
    cache = await prefilled(served)
    other = [Message(role="system", content=SYSTEM.text[:40] + "but a dog does not."), QUESTION]
    reply = await served.chat(other, cache_id=cache.cache_id)
    assert 0 < reply["kv_transfer_params"]["cached_tokens"] < cache.num_tokens
    assert content(reply) == served.text(greedy(reference, served.prompt(other), 8))


async def test_one_token_at_least_is_read(served: Served, reference: LlamaForCausalLM) -> None:
    whole = await prefilled(served, stable_messages=None)
    reply = await served.chat(cache_id=whole.cache_id)
    assert reply["kv_transfer_params"]["cached_tokens"] == whole.num_tokens - 1
    assert content(reply) == served.text(greedy(reference, served.prompt(), 8))


async def test_the_turn_after_reuses_what_was_read_and_written(served: Served, reference: LlamaForCausalLM) -> None:
    first = await served.chat()
    usage = first["kv_transfer_params"]
    assert usage["num_tokens"] == len(served.prompt()) + 8 - 1  # the last token written has not been read
    talk = [*TALK, Message(role="assistant", content=content(first)), QUESTION]
    second = await served.chat(talk, cache_id=usage["cache_id"])
    assert second["kv_transfer_params"]["cached_tokens"] > len(served.prompt()) - 2
    assert content(second) == served.text(greedy(reference, served.prompt(talk), 8))


async def test_a_cache_knows_what_it_is(served: Served) -> None:
    usage = (await served.chat())["kv_transfer_params"]
    info = await served.client.cache(usage["cache_id"])
    assert (info.num_tokens, info.digest, info.provenance) == (usage["num_tokens"], usage["digest"], "exact")
    await served.client.drop(usage["cache_id"])
    with pytest.raises(CacheNotFound):
        await served.client.cache(usage["cache_id"])


async def test_store_and_reuse_can_be_switched_off(served: Served) -> None:
    usage = (await served.chat(store=False))["kv_transfer_params"]
    assert usage["cache_id"] is None and served.worker.pool.stats.num_caches == 0
    await served.chat()
    assert (await served.chat(reuse=False))["kv_transfer_params"]["path"] == "prefill"
    assert (await served.chat())["kv_transfer_params"]["path"] == "exact"


async def test_no_tenant_is_served_from_anothers_cache(served: Served) -> None:
    cache = await prefilled(served)
    with pytest.raises(CacheMismatch, match="another tenant"):
        await served.chat(cache_id=cache.cache_id, tenant_salt=OTHER_SALT)
    reply = await served.chat(tenant_salt=OTHER_SALT)
    assert reply["kv_transfer_params"]["path"] == "prefill"


async def test_another_cache_never_stands_in_for_one_that_is_gone(served: Served) -> None:
    await prefilled(served)
    with pytest.raises(CacheNotFound, match=UNKNOWN):
        await served.chat(cache_id=UNKNOWN)


async def test_a_cache_of_another_beginning_is_refused(served: Served) -> None:
    ids = [7, *served.prompt()[:40]]
    cache = await prefilled(served, messages=None, stable_messages=None, token_ids=ids)
    with pytest.raises(CacheMismatch, match="no first token in common"):
        await served.chat(cache_id=cache.cache_id)


async def test_an_answer_is_given_even_if_the_pool_has_no_room_for_it(served: Served) -> None:
    pool = served.worker.pool
    with pool.allocate(pool.stats.num_blocks):
        reply = await served.chat()
        assert content(reply) and reply["kv_transfer_params"]["cache_id"] is None
        with pytest.raises(Overloaded) as refused:
            await prefilled(served)
        assert refused.value.retry_after_s
    assert await counts(served, "cache_store_failures_total") == {"pool_full": 1}


async def test_an_answer_is_given_even_if_its_kv_is_fetched_too_late(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def too_late(sequence: TransformersSequence, begin: int) -> None:
        raise DeadlineExceeded("planted")

    monkeypatch.setattr(TransformersSequence, "fetch", too_late)
    reply = await served.chat()
    assert content(reply) and reply["kv_transfer_params"]["cache_id"] is None
    assert await counts(served, "cache_store_failures_total") == {"deadline_exceeded": 1}


async def test_a_boundary_that_does_not_exist_is_an_error(served: Served) -> None:
    with pytest.raises(InvalidRequest, match="there are 2 messages"):
        await served.chat(stable_messages=3)
    assert (await served.chat(stable_messages=1))["kv_transfer_params"]["stable_tokens"] == boundary(served)


async def test_messages_that_cannot_be_rendered_alone_are_no_prefix(tmp_path: Path) -> None:
    async with serving(tiny.model_folder(tmp_path / "strict", template="strict")) as served:
        with pytest.raises(InvalidRequest, match="no stable tokens") as refused:
            await prefilled(served)
        assert refused.value.param == "stable_messages"
        assert (await served.chat(stable_messages=1))["kv_transfer_params"]["stable_tokens"] is None


async def test_streams_report_what_was_kept(served: Served) -> None:
    request = chat_request(stream=True)
    parts = [part async for parts in served.client.chat_stream(request, timeout_s=60) for part in parts]
    usage = parts[-1]["kv_transfer_params"]
    assert (await served.client.cache(usage["cache_id"])).num_tokens == usage["num_tokens"]


async def test_tokenize_tells_the_boundary(served: Served) -> None:
    reply = await served.client.tokenize(Prompt(messages=TALK, stable_messages=1))
    assert (reply.token_ids, reply.stable_tokens) == (served.prompt(), boundary(served))
