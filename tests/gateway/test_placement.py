"""Several workers in a tier: prompts go to the worker that has their prefix, or spread over free workers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from gateway.errors import NoUsableWorker
from gateway.upstream.tier import AFFINITY_SLACK, Tier
from tests.gateway.stack import LONG, MESSAGES, Stack, follow_up, in_process, report, right_answer, text, values
from tools.fake_worker import FakeWorker


@asynccontextmanager
async def two_small_workers(**changes: Any) -> AsyncIterator[tuple[Stack, FakeWorker]]:
    other = FakeWorker("small-1", "fake-small")
    workers = values()["workers"] | {"small-1": {"tier": "small", "url": "http://small-1"}}
    async with in_process({"small-1": httpx.ASGITransport(other)}, workers=workers, **changes) as stack:
        stack.large.peers = {"small-0": stack.small, "small-1": other}
        yield stack, other


def tier_of(stack: Stack) -> Tier:
    tier: Tier = stack.app.state.gateway.parts.fleet.tiers["small"]
    return tier


def document(number: int) -> list[dict[str, Any]]:
    return [{"role": "system", "content": f"Document {number}. {LONG}"}, {"role": "user", "content": "What of it?"}]


async def test_documents_spread_and_their_follow_ups_stay() -> None:
    async with two_small_workers() as (stack, other):
        for number in range(4):
            first = await stack.chat(messages := document(number))
            second = await stack.chat(messages := follow_up(messages, first, "And then?"))
            assert text(second) == right_answer(stack.small, messages)
        for worker in (stack.small, other):
            documents = [body["messages"][0]["content"] for body in worker.requests("prefill")]
            assert len(documents) == 4 and len(set(documents)) == 2, "two documents each, with both turns"


async def test_a_handoff_uses_the_worker_that_prefilled_as_source() -> None:
    async with two_small_workers() as (stack, other):
        await stack.chat(document(0))
        assert report(await stack.escalate(document(1)))["path"] == "mapped"
        assert stack.large.requests("transfer")[0]["source_worker"] == "small-1" and other.requests("prefill")


@pytest.mark.parametrize(("num_calls", "stays"), [(AFFINITY_SLACK, True), (AFFINITY_SLACK + 1, False)])
async def test_prefix_affinity_yields_to_a_long_queue(num_calls: int, stays: bool) -> None:
    async with two_small_workers() as (stack, _):
        first = await stack.chat()
        tier_of(stack).workers["small-0"].num_in_flight = num_calls
        second = await stack.chat(follow_up(MESSAGES, first, "And then?"))
        assert (len(stack.small.requests("prefill")) == 2) is stays and report(second)["tier"] == "small"


async def test_pick_skips_avoided_and_drained_workers() -> None:
    async with two_small_workers() as (stack, _):
        tier = tier_of(stack)
        assert tier.pick("small-0", avoid=["small-0"]).id == "small-1"
        tier.workers["small-1"].is_drained = True
        assert tier.pick("small-1").id == "small-0"
        with pytest.raises(NoUsableWorker):
            tier.pick(avoid=["small-0"])
