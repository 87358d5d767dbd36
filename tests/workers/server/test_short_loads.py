"""An engine that loads only part of a reused cache and prefills the rest, as vLLM does: the report and the stored
cache say what was loaded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.workers.engines import tiny
from tests.workers.server.support import SALT, ServedWorker, content
from tests.workers.server.test_mapped import HEAD, NUM, TAIL, Pair, hand_over, replay_answer
from workers.api.schemas import KVUsage, PrefillRequest
from workers.engines.base import MIN_LOADED_TOKENS, KVSource
from workers.engines.transformers.engine import TransformersSequence


@pytest.fixture
def max_loaded(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> int:
    """Limit how many tokens a sequence loads."""
    num_tokens: int = request.param
    load = TransformersSequence.load

    async def load_some(sequence: TransformersSequence, token_ids: Sequence[int], source: KVSource) -> None:
        await load(sequence, token_ids, source)
        sequence.truncate(min(num_tokens, len(token_ids)))
        await sequence.prefill(token_ids[num_tokens:])

    monkeypatch.setattr(TransformersSequence, "load", load_some)
    return num_tokens


@pytest.mark.parametrize("max_loaded", [0], indirect=True)
async def test_mapped_cache_that_was_not_loaded_gives_an_exact_answer(
    pair: Pair, folder: Path, max_loaded: int
) -> None:
    _, large = pair
    moved = await hand_over(pair)
    reply = await large.chat(cache_id=moved.cache_id, max_tokens=NUM)
    usage = usage_of(reply)
    assert (usage.path, usage.mapped_tokens, usage.cached_tokens) == ("prefill", 0, 0)
    assert usage.provenance == "exact" and usage.cache_id is not None
    kept = await large.client.cache(usage.cache_id)
    assert kept.provenance == "exact"
    assert content(reply) == large.text(tiny.greedy(tiny.reference(folder), large.prompt(), NUM))
    assert 'path="prefill"} 1.0' in (await large.http.get("/metrics")).text


@pytest.mark.parametrize("max_loaded", [64], indirect=True)
async def test_partly_loaded_mapped_cache_reports_the_loaded_tokens(
    pair: Pair, folder: Path, small_folder: Path, bundle: Path, max_loaded: int
) -> None:
    _, large = pair
    moved = await hand_over(pair)
    reply = await large.chat(cache_id=moved.cache_id, max_tokens=NUM)
    usage = usage_of(reply)
    assert (usage.path, usage.mapped_tokens) == ("mapped", max_loaded - HEAD)
    assert content(reply) == large.text(replay_answer(folder, small_folder, bundle, large.prompt(), max_loaded, NUM))
    assert moved.num_tokens == len(large.prompt()) - TAIL > max_loaded


@pytest.mark.parametrize("max_loaded", [0, 40], indirect=True)
async def test_prefilled_tokens_are_not_counted_as_hits(served: ServedWorker, folder: Path, max_loaded: int) -> None:
    request_body = PrefillRequest(token_ids=served.prompt(), tenant_salt=SALT)
    cache = await served.client.prefill(request_body, timeout_s=60)
    reply = await served.chat(cache_id=cache.cache_id, max_tokens=NUM)
    usage = usage_of(reply)
    assert (usage.path, usage.cached_tokens) == ("exact" if max_loaded else "prefill", max_loaded)
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == max_loaded
    assert (await served.client.prefill(request_body, timeout_s=60)).cached_tokens == max_loaded
    assert content(reply) == served.text(tiny.greedy(tiny.reference(folder), served.prompt(), NUM))


async def test_few_cached_tokens_are_prefilled_instead(pair: Pair) -> None:
    _, large = pair
    moved = await hand_over(pair)
    few = MIN_LOADED_TOKENS - 1
    usage = usage_of(await large.chat(cache_id=moved.cache_id, num_tokens=few))
    assert (usage.path, usage.provenance, usage.mapped_tokens) == ("prefill", "exact", 0)
    usage = usage_of(await large.chat(cache_id=moved.cache_id, num_tokens=few + 1))
    assert (usage.path, usage.mapped_tokens) == ("mapped", few + 1 - HEAD)


def usage_of(reply: dict[str, object]) -> KVUsage:
    return KVUsage.model_validate(reply["kv_transfer_params"])
