"""The small worker is killed with much under way, and started anew on the same port.

    before   a first turn through each gateway, and a prefill by the contract, so that its caches are known
    dead     killed while it writes two answers, its cache is being read, and a handoff is about to begin
    anew     a new epoch on the old port; the registries still hold the old ids

One gateway looks after its workers, the other learns of nothing but by its own calls. Whatever was under way and
whatever comes is answered in time, and rightly; afterwards requests are mapped again.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from tests.e2e import contract
from tests.e2e.conftest import Right
from tests.e2e.running import NUM_TOKENS, REQUEST_S, Client, Cluster, Reply, eventually, request
from tests.e2e.talks import Talk, carried_on, talk
from workers.api.errors import CacheNotFound, CacheStale, TransferFailed, WorkerUnavailable
from workers.api.schemas import DEFAULT_NATIVE_HEAD as HEAD
from workers.api.schemas import PrefillReply, TransferReply
from workers.digest import token_digest
from workers.reference import Reference

FIRST, HANDED, WHOLE, STREAMED = talk("Hamlet"), talk("Othello"), talk("Mercutio"), talk("Tybalt")
READ = talk("Iago", num_words=4000)  # a handoff of many chunks
ENDLESS = 250  # tokens: an answer that is not over before it is broken off


@dataclass(frozen=True)
class Before:
    """What was known when it was killed."""

    first_answer: str
    read: PrefillReply


@dataclass(frozen=True)
class UnderWay:
    """What came of the work under way: an answer of which nothing was told yet, the frames of one that was streamed, a
    handoff, and the transfer of a cache that was being read."""

    whole: Reply
    frames: list[str]
    handed: Reply
    moved: TransferReply | BaseException


@pytest.fixture(scope="module")
def watching(cluster: Cluster) -> Client:
    return cluster.client


@pytest.fixture(scope="module")
def before(cluster: Cluster, blind: Client, watching: Client, right: Right) -> Before:
    eventually(lambda: all(watching.tiers.values()), "all that other tests froze is up again")
    replies = [client.ask(FIRST, "small") for client in (blind, watching)]
    assert [reply.path for reply in replies] == ["prefill", "exact"]
    for reply in replies:
        right(reply, FIRST)
    blind.ask(HANDED, "small")
    return Before(replies[0].text, asyncio.run(contract.prefilled(cluster, READ)))


@pytest.fixture(scope="module")
def dead(cluster: Cluster, blind: Client, before: Before) -> UnderWay:
    return asyncio.run(killed(cluster, blind, before.read))


async def killed(cluster: Cluster, blind: Client, read: PrefillReply) -> UnderWay:
    """The large worker is held in the middle of its copy, and before it asks for another lease, until the small one is
    dead."""
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(3) as pool:
        moving = asyncio.create_task(contract.transferred(cluster, read))
        await a_lease_is_out(cluster, read, moving)
        with cluster.frozen("large"):
            handed = loop.run_in_executor(pool, blind.escalate, HANDED)
            is_asked = partial(blind.metric, "num_requests_running", tier="large")
            await asyncio.to_thread(eventually, is_asked, "the large worker is asked to hand over")
            wholly = loop.run_in_executor(pool, blind.post, endless(WHOLE))
            streamed = loop.run_in_executor(pool, frames_of, blind, endless(STREAMED, stream=True))
            await asyncio.to_thread(they_write, cluster)
            cluster.kill("small")
        (moved,) = await asyncio.gather(moving, return_exceptions=True)
        return UnderWay(await wholly, await streamed, await handed, moved)


async def a_lease_is_out(cluster: Cluster, read: PrefillReply, moving: asyncio.Task[Any]) -> None:
    async with cluster.worker("small") as small:
        while not moving.done() and not (await small.cache(read.cache_id)).num_leases:
            pass


def they_write(cluster: Cluster) -> None:
    """Waits until the small worker writes two answers."""
    written = partial(cluster.worker_metric, "small", "inter_token_latency_seconds_count")
    eventually(lambda: cluster.worker_metric("small", "num_requests_running") == 2, "it is at both")
    before = written()
    eventually(lambda: written() > before + 4, "it writes")


def frames_of(client: Client, body: dict[str, Any]) -> list[str]:
    with client.http.stream("POST", "/v1/chat/completions", json=body) as stream:
        return [line for line in stream.iter_lines() if line]


def endless(asked: Talk, **changes: Any) -> dict[str, Any]:
    return request(asked) | {"max_tokens": ENDLESS} | changes


@pytest.fixture(scope="module")
def anew(cluster: Cluster, before: Before, dead: UnderWay) -> Before:
    cluster.start("small")
    return before


def test_killed_in_an_answer_of_which_nothing_was_told(dead: UnderWay, right: Right) -> None:
    assert (dead.whole.path, dead.whole.told["tier"]) == ("fallback:small_worker_unavailable", "large")
    assert dead.whole.took_s < REQUEST_S
    right(dead.whole, WHOLE, ENDLESS)


def test_killed_in_the_middle_of_a_stream(dead: UnderWay) -> None:
    """What was told cannot be taken back: an error, and never another model's text."""
    assert '"role"' in dead.frames[0] and len(dead.frames) > 2
    assert '"error"' in dead.frames[-1] and "[DONE]" not in "".join(dead.frames)
    assert "tiny-large" not in "".join(dead.frames)


def test_killed_before_it_was_asked_for_a_lease(dead: UnderWay, right: Right) -> None:
    assert (dead.handed.path, dead.handed.told["tier"]) == ("fallback:worker_unavailable", "large")
    assert dead.handed.took_s < REQUEST_S
    right(dead.handed, HANDED)


async def test_killed_while_its_cache_was_read(cluster: Cluster, dead: UnderWay, reference: Reference) -> None:
    """What was read then is good, or told to be not; nothing between."""
    cache_id, expected = None, reference.native("large", READ, NUM_TOKENS)
    if isinstance(dead.moved, TransferReply):
        assert dead.moved.digest == token_digest(reference.prompt(READ)[: dead.moved.num_tokens], contract.SALT)
        cache_id = dead.moved.cache_id
        expected = reference.handed_over(READ, dead.moved.num_tokens - HEAD, NUM_TOKENS)
    else:
        assert isinstance(dead.moved, (TransferFailed, CacheStale, WorkerUnavailable))
    async with cluster.worker("large") as large:
        answer = await large.chat(contract.chat(READ, cache_id), timeout_s=contract.TIMEOUT_S)
    reference.check(answer, expected)


def test_dead_between_prefill_and_transfer(blind: Client, dead: UnderWay, right: Right) -> None:
    reply = blind.escalate(FIRST)
    assert (reply.path, reply.told["tier"]) == ("fallback:worker_unavailable", "large")
    right(reply, FIRST)


@pytest.mark.parametrize("policy", ["always_escalate", "confidence"])
def test_dead_before_its_prefill(blind: Client, dead: UnderWay, right: Right, policy: str) -> None:
    asked = talk(f"Gertrude {policy}")
    reply = blind.ask(asked, policy=policy)
    assert (reply.path, reply.told["tier"]) == ("fallback:small_worker_unavailable", "large")
    right(reply, asked)


def test_dead_and_noticed(watching: Client, dead: UnderWay, right: Right) -> None:
    eventually(lambda: not watching.tiers["small"], "the gateway knows")
    asked = talk("Laertes")
    reply = watching.escalate(asked)
    assert (reply.path, reply.told["tier"]) == ("fallback:small_no_usable_worker", "large")
    right(reply, asked)


async def test_dead_by_the_contract(cluster: Cluster, before: Before, dead: UnderWay) -> None:
    with pytest.raises(WorkerUnavailable):
        await contract.transferred(cluster, before.read)


def test_anew_with_the_old_id_in_the_registry(blind: Client, anew: Before, right: Right) -> None:
    """The blind gateway takes it for the worker that it knew; the worker says that it is not."""
    asked = carried_on(FIRST, anew.first_answer)
    replies = [blind.ask(FIRST, "small"), blind.ask(asked), blind.escalate(talk("Yorick"))]
    assert replies[0].told["cached_tokens"] == 0
    for reply, wanted in zip(replies, (FIRST, asked, talk("Yorick")), strict=True):
        right(reply, wanted)
    assert replies[-1].path == "mapped"


def test_anew_and_noticed(cluster: Cluster, watching: Client, anew: Before, right: Right) -> None:
    eventually(lambda: watching.tiers["small"], "the gateway knows that it is back")
    assert watching.metric("worker_restarts_total", target=cluster.id("small")) == 1
    stale = watching.metric("prefix_lookup_stale_total", tier="small")
    reply = watching.escalate(FIRST)
    assert reply.path == "mapped"
    right(reply, FIRST)
    assert watching.metric("prefix_lookup_stale_total", tier="small") == stale, "the old id went with its epoch"


async def test_anew_by_the_contract(cluster: Cluster, anew: Before) -> None:
    with pytest.raises(CacheNotFound, match="epoch"):
        await contract.transferred(cluster, anew.read)
    again = await contract.prefilled(cluster, READ)
    assert again.epoch != anew.read.epoch and again.cache_id != anew.read.cache_id
    assert again.digest == anew.read.digest
    assert (await contract.transferred(cluster, again)).num_tokens > 0
