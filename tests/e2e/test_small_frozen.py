"""The small worker is frozen before its prefill, or between it and the transfer: requests are answered in time, and
rightly; afterwards they are mapped again."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e import contract
from tests.e2e.conftest import Right
from tests.e2e.running import REQUEST_S, Client, Cluster, Reply
from tests.e2e.talks import talk
from workers.api.errors import DeadlineExceeded


def in_time(reply: Reply) -> Reply:
    assert reply.status == 200, reply.body
    assert reply.took_s < REQUEST_S
    return reply


def is_mapped_again(client: Client, name: str, right: Right) -> None:
    asked = talk(f"{name} once more")
    reply = in_time(client.escalate(asked))
    assert reply.path == "mapped"
    right(reply, asked)


def test_frozen_between_prefill_and_transfer(cluster: Cluster, blind: Client, right: Right) -> None:
    asked = talk("Macbeth")
    blind.ask(asked, "small")
    with cluster.frozen("small"):
        reply = in_time(blind.escalate(asked))
    assert (reply.path, reply.told["tier"]) == ("fallback:deadline_exceeded", "large")
    right(reply, asked)
    is_mapped_again(blind, "Macbeth", right)


def test_frozen_before_its_prefill(cluster: Cluster, blind: Client, right: Right) -> None:
    asked = talk("Lear")
    with cluster.frozen("small"), ThreadPoolExecutor(2) as pool:
        replies = list(pool.map(lambda ask: in_time(ask(asked)), (blind.escalate, blind.ask)))
    for reply in replies:
        assert (reply.path, reply.told["tier"]) == ("fallback:small_deadline_exceeded", "large")
        right(reply, asked)
    is_mapped_again(blind, "Lear", right)


async def test_frozen_by_the_contract(cluster: Cluster) -> None:
    read = await contract.prefilled(cluster, talk("Edgar"))
    with cluster.frozen("small"), pytest.raises(DeadlineExceeded):
        await contract.transferred(cluster, read, deadline_s=0.5)
    assert (await contract.transferred(cluster, read)).num_tokens > 0
