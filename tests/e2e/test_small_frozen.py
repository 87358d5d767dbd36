"""The small worker is frozen before its prefill, or between prefill and transfer. Requests are answered in time;
afterwards they are mapped again."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e import contract
from tests.e2e.conftest import AssertRight
from tests.e2e.conversations import conversation
from tests.e2e.running import REQUEST_S, Client, Cluster, Reply
from workers.api.errors import DeadlineExceeded


def in_time(reply: Reply) -> Reply:
    assert reply.status == 200, reply.body
    assert reply.took_s < REQUEST_S
    return reply


def assert_mapped_again(client: Client, name: str, assert_right: AssertRight) -> None:
    messages = conversation(f"{name} once more")
    reply = in_time(client.escalate(messages))
    assert reply.path == "mapped"
    assert_right(reply, messages)


def test_frozen_between_prefill_and_transfer(cluster: Cluster, unpolled: Client, assert_right: AssertRight) -> None:
    messages = conversation("Macbeth")
    unpolled.ask(messages, "small")
    with cluster.frozen("small"):
        reply = in_time(unpolled.escalate(messages))
    assert (reply.path, reply.report["tier"]) == ("fallback:deadline_exceeded", "large")
    assert_right(reply, messages)
    assert_mapped_again(unpolled, "Macbeth", assert_right)


def test_frozen_before_the_prefill(cluster: Cluster, unpolled: Client, assert_right: AssertRight) -> None:
    messages = conversation("Lear")
    with cluster.frozen("small"), ThreadPoolExecutor(2) as pool:
        replies = list(pool.map(lambda ask: in_time(ask(messages)), (unpolled.escalate, unpolled.ask)))
    for reply in replies:
        assert (reply.path, reply.report["tier"]) == ("fallback:small_deadline_exceeded", "large")
        assert_right(reply, messages)
    assert_mapped_again(unpolled, "Lear", assert_right)


async def test_frozen_worker_fails_a_transfer_at_its_deadline(cluster: Cluster) -> None:
    prefilled = await contract.prefill(cluster, conversation("Edgar"))
    with cluster.frozen("small"), pytest.raises(DeadlineExceeded):
        await contract.transfer(cluster, prefilled, deadline_s=0.5)
    assert (await contract.transfer(cluster, prefilled)).num_tokens > 0
