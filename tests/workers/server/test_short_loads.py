"""An engine that could not load all that was reused, and read the rest, as vLLM does: answers tell, and keep, what was
in truth."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.workers.engines import tiny
from tests.workers.server.support import SALT, Served, content
from tests.workers.server.test_mapped import HEAD, NUM, TAIL, Pair, handed_over, replayed
from workers.api.schemas import KVUsage, PrefillRequest
from workers.engines.base import MIN_LOADED_TOKENS, KVSource
from workers.engines.transformers.engine import TransformersSequence


@pytest.fixture
def at_most(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> int:
    """No sequence loads more tokens than that."""
    num_tokens: int = request.param
    load = TransformersSequence.load

    async def load_some(sequence: TransformersSequence, token_ids: Sequence[int], source: KVSource) -> None:
        await load(sequence, token_ids, source)
        sequence.truncate(min(num_tokens, len(token_ids)))
        await sequence.prefill(token_ids[num_tokens:])

    monkeypatch.setattr(TransformersSequence, "load", load_some)
    return num_tokens


@pytest.mark.parametrize("at_most", [0], indirect=True)
async def test_a_mapped_cache_that_was_not_loaded_made_no_mapped_answer(
    pair: Pair, folder: Path, at_most: int
) -> None:
    _, large = pair
    moved = await handed_over(pair)
    reply = await large.chat(cache_id=moved.cache_id, max_tokens=NUM)
    usage = usage_of(reply)
    assert (usage.path, usage.mapped_tokens, usage.cached_tokens) == ("prefill", 0, 0)
    assert usage.provenance == "exact" and usage.cache_id is not None
    kept = await large.client.cache(usage.cache_id)
    assert kept.provenance == "exact"
    assert content(reply) == large.text(tiny.greedy(tiny.reference(folder), large.prompt(), NUM))
    assert 'path="prefill"} 1.0' in (await large.http.get("/metrics")).text


@pytest.mark.parametrize("at_most", [64], indirect=True)
async def test_of_a_mapped_cache_that_was_loaded_in_part_that_part_is_told(
    pair: Pair, folder: Path, small_folder: Path, bundle: Path, at_most: int
) -> None:
    _, large = pair
    moved = await handed_over(pair)
    reply = await large.chat(cache_id=moved.cache_id, max_tokens=NUM)
    usage = usage_of(reply)
    assert (usage.path, usage.mapped_tokens) == ("mapped", at_most - HEAD)
    assert content(reply) == large.text(replayed(folder, small_folder, bundle, large.prompt(), at_most, NUM))
    assert moved.num_tokens == len(large.prompt()) - TAIL > at_most


@pytest.mark.parametrize("at_most", [0, 40], indirect=True)
async def test_exact_tokens_that_were_read_anew_are_not_counted_as_hits(
    served: Served, folder: Path, at_most: int
) -> None:
    asked = PrefillRequest(token_ids=served.prompt(), tenant_salt=SALT)
    cache = await served.client.prefill(asked, timeout_s=60)
    reply = await served.chat(cache_id=cache.cache_id, max_tokens=NUM)
    usage = usage_of(reply)
    assert (usage.path, usage.cached_tokens) == ("exact" if at_most else "prefill", at_most)
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == at_most
    assert (await served.client.prefill(asked, timeout_s=60)).cached_tokens == at_most
    assert content(reply) == served.text(tiny.greedy(tiny.reference(folder), served.prompt(), NUM))


async def test_a_few_tokens_of_a_cache_are_read_instead(pair: Pair) -> None:
    _, large = pair
    moved = await handed_over(pair)
    few = MIN_LOADED_TOKENS - 1
    usage = usage_of(await large.chat(cache_id=moved.cache_id, num_tokens=few))
    assert (usage.path, usage.provenance, usage.mapped_tokens) == ("prefill", "exact", 0)
    usage = usage_of(await large.chat(cache_id=moved.cache_id, num_tokens=few + 1))
    assert (usage.path, usage.mapped_tokens) == ("mapped", few + 1 - HEAD)


def usage_of(reply: dict[str, object]) -> KVUsage:
    return KVUsage.model_validate(reply["kv_transfer_params"])
