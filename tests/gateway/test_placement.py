"""Several workers a tier: prompts go where their prefix was read, and spread over those that are free."""

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
async def two_small(**changes: Any) -> AsyncIterator[tuple[Stack, FakeWorker]]:
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


async def test_documents_spread_and_their_turns_stay() -> None:
    async with two_small() as (stack, other):
        for number in range(4):
            first = await stack.chat(messages := document(number))
            second = await stack.chat(after := follow_up(messages, first, "And then?"))
            assert text(second) == right_answer(stack.small, after)
        for worker in (stack.small, other):
            asked = [call["messages"][0]["content"] for call in worker.requests("prefill")]
            assert len(asked) == 4 and len(set(asked)) == 2, "two documents each, both turns of them"


async def test_a_handoff_reads_from_the_worker_that_has_read() -> None:
    async with two_small() as (stack, other):
        await stack.chat(document(0))
        assert report(await stack.escalate(document(1)))["path"] == "mapped"
        assert stack.large.requests("transfer")[0]["source_worker"] == "small-1" and other.requests("prefill")


@pytest.mark.parametrize(("num_calls", "stays"), [(AFFINITY_SLACK, True), (AFFINITY_SLACK + 1, False)])
async def test_a_prefix_is_not_worth_any_queue(num_calls: int, stays: bool) -> None:
    async with two_small() as (stack, _):
        first = await stack.chat()
        tier_of(stack).workers["small-0"].num_in_flight = num_calls
        second = await stack.chat(follow_up(MESSAGES, first, "And then?"))
        assert (len(stack.small.requests("prefill")) == 2) is stays and report(second)["tier"] == "small"


async def test_who_is_avoided_or_not_usable_is_not_picked() -> None:
    async with two_small() as (stack, _):
        tier = tier_of(stack)
        assert tier.pick("small-0", avoid=["small-0"]).id == "small-1"
        tier.workers["small-1"].is_drained = True
        assert tier.pick("small-1").id == "small-0"
        with pytest.raises(NoUsableWorker):
            tier.pick(avoid=["small-0"])
