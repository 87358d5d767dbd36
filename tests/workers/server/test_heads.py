"""The cache of native heads: filled by prefill, tenant-isolated and bounded."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from mappers.models import prefill
from tests.workers.engines import tiny
from tests.workers.server.support import OTHER_SALT, SALT
from workers.engines import load_engine
from workers.serving.transfer import MAX_HEAD_TOKENS, MAX_HEADS, HeadCache

IDS = tiny.random_tokens(4)


@pytest.fixture
async def heads(folder: Path) -> AsyncIterator[HeadCache]:
    engine = load_engine(tiny.settings_for(folder))
    yield HeadCache(engine, priority=0)
    await engine.aclose()


async def test_head_matches_prefill_and_is_cached(heads: HeadCache, reference: LlamaForCausalLM) -> None:
    head, native = await heads.get(IDS, SALT), prefill(reference, IDS)
    for ours, theirs in zip(head.keys + head.values, native.keys + native.values, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-4)
    assert await heads.get(IDS, SALT) is head


@pytest.mark.parametrize("ids, salt", [(IDS, OTHER_SALT), (IDS[:-1], SALT), (IDS[:-1] + [9], SALT)])
async def test_head_is_not_shared_across_tokens_or_tenants(heads: HeadCache, ids: list[int], salt: str) -> None:
    head = await heads.get(IDS, SALT)
    assert await heads.get(ids, salt) is not head


async def test_head_cache_is_bounded(heads: HeadCache) -> None:
    long = tiny.random_tokens(MAX_HEAD_TOKENS + 1)
    assert await heads.get(long, SALT) is not await heads.get(long, SALT)
    head = await heads.get(IDS, SALT)
    for token_id in range(3, 3 + MAX_HEADS):
        await heads.get([token_id], SALT)
    assert await heads.get(IDS, SALT) is not head
