"""The small worker is killed between a prefill and the transfer, and started anew on the same port.

Before two gateways: one that looks after its workers, and one that learns of nothing but by its own calls. A request is
answered in time, and rightly; afterwards it is mapped again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.e2e import contract
from tests.e2e.conftest import Right
from tests.e2e.running import DEADLINES, NEVER_LOOKS, Client, Cluster, eventually
from tests.e2e.talks import carried_on, talk
from workers.api.errors import CacheNotFound, WorkerUnavailable
from workers.api.schemas import PrefillReply


@dataclass(frozen=True)
class Before:
    """What was known when it was killed: a first turn through each gateway, and a prefill by the contract."""

    blind: Client
    watching: Client
    first_answer: str
    read: PrefillReply


FIRST, CONTRACT = talk("Hamlet"), talk("Ophelia")


@pytest.fixture(scope="module")
def before(cluster: Cluster, right: Right) -> Iterator[Before]:
    often = DEADLINES | {"worker_poll_s": 0.2}
    with cluster.gateway("blind", **NEVER_LOOKS) as blind, cluster.gateway("watching", deadlines=often) as watching:
        replies = [client.ask(FIRST, "small") for client in (blind, watching)]
        assert [reply.path for reply in replies] == ["prefill", "exact"]
        for reply in replies:
            right(reply, FIRST)
        read = asyncio.run(contract.prefilled(cluster, CONTRACT))
        yield Before(blind, watching, replies[0].text, read)


@pytest.fixture(scope="module")
def dead(cluster: Cluster, before: Before) -> Before:
    cluster.kill("small")
    return before


@pytest.fixture(scope="module")
def anew(cluster: Cluster, dead: Before) -> Before:
    """A new epoch on the old port. The registries still hold the old ids."""
    cluster.start("small")
    return dead


def test_dead_between_prefill_and_transfer(dead: Before, right: Right) -> None:
    reply = dead.blind.escalate(FIRST)
    assert (reply.path, reply.told["tier"]) == ("fallback:worker_unavailable", "large")
    right(reply, FIRST)


@pytest.mark.parametrize("policy", ["always_escalate", "confidence"])
def test_dead_before_its_prefill(dead: Before, right: Right, policy: str) -> None:
    asked = talk(f"Gertrude {policy}")
    reply = dead.blind.ask(asked, policy=policy)
    assert (reply.path, reply.told["tier"]) == ("fallback:small_worker_unavailable", "large")
    right(reply, asked)


def test_dead_and_noticed(dead: Before, right: Right) -> None:
    eventually(lambda: not dead.watching.tiers["small"], "the gateway knows")
    asked = talk("Laertes")
    reply = dead.watching.escalate(asked)
    assert (reply.path, reply.told["tier"]) == ("fallback:small_no_usable_worker", "large")
    right(reply, asked)


async def test_dead_by_the_contract(cluster: Cluster, dead: Before) -> None:
    with pytest.raises(WorkerUnavailable):
        await contract.transferred(cluster, dead.read)


def test_anew_with_the_old_id_in_the_registry(anew: Before, right: Right) -> None:
    """The blind gateway takes it for the worker that it knew; the worker says that it is not."""
    asked = carried_on(FIRST, anew.first_answer)
    replies = [anew.blind.ask(FIRST, "small"), anew.blind.ask(asked), anew.blind.escalate(talk("Yorick"))]
    assert replies[0].told["cached_tokens"] == 0
    for reply, wanted in zip(replies, (FIRST, asked, talk("Yorick")), strict=True):
        right(reply, wanted)
    assert replies[-1].path == "mapped"


def test_anew_and_noticed(cluster: Cluster, anew: Before, right: Right) -> None:
    eventually(lambda: anew.watching.tiers["small"], "the gateway knows that it is back")
    reply = anew.watching.escalate(FIRST)
    assert reply.path == "mapped", "the old id went with its epoch: a miss, and no failure"
    right(reply, FIRST)
    assert anew.watching.metric("worker_restarts_total", target=cluster.id("small")) == 1
    assert anew.watching.metric("prefix_cache_stale_total", tier="small") == 0


async def test_anew_by_the_contract(cluster: Cluster, anew: Before) -> None:
    with pytest.raises(CacheNotFound, match="epoch"):
        await contract.transferred(cluster, anew.read)
    again = await contract.prefilled(cluster, CONTRACT)
    assert again.epoch != anew.read.epoch and again.cache_id != anew.read.cache_id
    assert again.digest == anew.read.digest
    assert (await contract.transferred(cluster, again)).num_tokens > 0
