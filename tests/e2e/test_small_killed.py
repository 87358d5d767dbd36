"""The small worker is killed with requests in flight, and started again on the same port.

    before      a first turn through each gateway, and a prefill, so that its caches are registered
    killed      while it decodes two answers, its cache is copied, and a handoff is about to start
    restarted   a new epoch on the old port; the registries still hold the old ids

One gateway polls its workers, the other has no health checks. Every request is answered in time, and rightly.
Afterwards requests are mapped again.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from tests.e2e import contract
from tests.e2e.conftest import AssertRight
from tests.e2e.contract import TIMEOUT_S
from tests.e2e.conversations import Messages, conversation, next_turn
from tests.e2e.running import NUM_TOKENS, REQUEST_S, Client, Cluster, Reply, eventually, request
from workers.api.errors import CacheNotFound, CacheStale, TransferFailed, WorkerUnavailable
from workers.api.schemas import DEFAULT_NATIVE_HEAD as HEAD
from workers.api.schemas import PrefillReply, TransferReply
from workers.digest import token_digest
from workers.reference import Reference

FIRST, HANDED_OVER, WHOLE, STREAMED = map(conversation, ("Hamlet", "Othello", "Mercutio", "Tybalt"))
COPIED = conversation("Iago", num_words=4000)  # a handoff of many chunks
ENDLESS = 250  # tokens: more than it decodes before it is killed


@dataclass(frozen=True)
class Before:
    """What the worker held when it was killed."""

    first_answer: str
    prefill: PrefillReply


@dataclass(frozen=True)
class Outcomes:
    """How the requests in flight ended: a whole answer, the frames of a stream, a handoff, and a transfer."""

    whole: Reply
    frames: list[str]
    handoff: Reply
    transfer: TransferReply | BaseException


@pytest.fixture(scope="module")
def polling(cluster: Cluster) -> Client:
    return cluster.client


@pytest.fixture(scope="module")
def before(cluster: Cluster, unpolled: Client, polling: Client, assert_right: AssertRight) -> Before:
    eventually(lambda: all(polling.tiers.values()), "every tier is up again")
    replies = [client.ask(FIRST, "small") for client in (unpolled, polling)]
    assert [reply.path for reply in replies] == ["prefill", "exact"]
    for reply in replies:
        assert_right(reply, FIRST)
    unpolled.ask(HANDED_OVER, "small")
    return Before(replies[0].text, asyncio.run(contract.prefill(cluster, COPIED)))


@pytest.fixture(scope="module")
def killed(cluster: Cluster, unpolled: Client, before: Before) -> Outcomes:
    return asyncio.run(kill_during_requests(cluster, unpolled, before.prefill))


async def kill_during_requests(cluster: Cluster, unpolled: Client, prefill: PrefillReply) -> Outcomes:
    """Freeze the large worker in the middle of its copy, and before its next lease, until the small one is dead."""
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(3) as pool:
        transfer = asyncio.create_task(contract.transfer(cluster, prefill))
        await wait_for_lease(cluster, prefill, transfer)
        with cluster.frozen("large"):
            handoff = loop.run_in_executor(pool, unpolled.escalate, HANDED_OVER)
            has_request = partial(unpolled.metric, "num_requests_running", tier="large")
            await asyncio.to_thread(eventually, has_request, "the large worker has the handoff")
            whole = loop.run_in_executor(pool, unpolled.post, endless(WHOLE))
            streamed = loop.run_in_executor(pool, frames_of, unpolled, endless(STREAMED, stream=True))
            await asyncio.to_thread(wait_for_decoding, cluster)
            cluster.kill("small")
        (outcome,) = await asyncio.gather(transfer, return_exceptions=True)
        return Outcomes(await whole, await streamed, await handoff, outcome)


async def wait_for_lease(cluster: Cluster, prefill: PrefillReply, transfer: asyncio.Task[Any]) -> None:
    async with cluster.worker("small") as small:
        while not transfer.done() and not (await small.cache(prefill.cache_id)).num_leases:
            pass


def wait_for_decoding(cluster: Cluster) -> None:
    """Wait until the small worker decodes two answers."""
    num_tokens = partial(cluster.worker_metric, "small", "inter_token_latency_seconds_count")
    eventually(lambda: cluster.worker_metric("small", "num_requests_running") == 2, "it runs both")
    before = num_tokens()
    eventually(lambda: num_tokens() > before + 4, "it decodes")


def frames_of(client: Client, body: dict[str, Any]) -> list[str]:
    with client.http.stream("POST", "/v1/chat/completions", json=body) as stream:
        return [line for line in stream.iter_lines() if line]


def endless(messages: Messages, **changes: Any) -> dict[str, Any]:
    return request(messages) | {"max_tokens": ENDLESS} | changes


@pytest.fixture(scope="module")
def restarted(cluster: Cluster, before: Before, killed: Outcomes) -> Before:
    cluster.start("small")
    return before


def test_whole_answer_is_replaced(killed: Outcomes, assert_right: AssertRight) -> None:
    assert (killed.whole.path, killed.whole.report["tier"]) == ("fallback:small_worker_unavailable", "large")
    assert killed.whole.took_s < REQUEST_S
    assert_right(killed.whole, WHOLE, ENDLESS)


def test_stream_ends_with_an_error(killed: Outcomes) -> None:
    """The text that was sent is never continued by another model."""
    assert '"role"' in killed.frames[0] and len(killed.frames) > 2
    assert '"error"' in killed.frames[-1] and "[DONE]" not in "".join(killed.frames)
    assert "tiny-large" not in "".join(killed.frames)


def test_handoff_before_its_lease_falls_back(killed: Outcomes, assert_right: AssertRight) -> None:
    assert (killed.handoff.path, killed.handoff.report["tier"]) == ("fallback:worker_unavailable", "large")
    assert killed.handoff.took_s < REQUEST_S
    assert_right(killed.handoff, HANDED_OVER)


async def test_transfer_during_the_copy_is_right_or_fails(
    cluster: Cluster, killed: Outcomes, reference: Reference
) -> None:
    """A transfer that succeeds has copied the right cache."""
    cache_id, expected = None, reference.native("large", COPIED, NUM_TOKENS)
    if isinstance(killed.transfer, TransferReply):
        assert killed.transfer.digest == token_digest(
            reference.prompt(COPIED)[: killed.transfer.num_tokens], contract.SALT
        )
        cache_id = killed.transfer.cache_id
        expected = reference.handed_over(COPIED, killed.transfer.num_tokens - HEAD, NUM_TOKENS)
    else:
        assert isinstance(killed.transfer, (TransferFailed, CacheStale, WorkerUnavailable))
    async with cluster.worker("large") as large:
        answer = await large.chat(contract.chat_request(COPIED, cache_id), timeout_s=TIMEOUT_S)
    reference.check(answer, expected)


def test_dead_worker_before_a_transfer(unpolled: Client, killed: Outcomes, assert_right: AssertRight) -> None:
    reply = unpolled.escalate(FIRST)
    assert (reply.path, reply.report["tier"]) == ("fallback:worker_unavailable", "large")
    assert_right(reply, FIRST)


@pytest.mark.parametrize("policy", ["always_escalate", "confidence"])
def test_dead_worker_before_a_prefill(
    unpolled: Client, killed: Outcomes, assert_right: AssertRight, policy: str
) -> None:
    messages = conversation(f"Gertrude {policy}")
    reply = unpolled.ask(messages, policy=policy)
    assert (reply.path, reply.report["tier"]) == ("fallback:small_worker_unavailable", "large")
    assert_right(reply, messages)


def test_polling_gateway_skips_the_dead_worker(polling: Client, killed: Outcomes, assert_right: AssertRight) -> None:
    eventually(lambda: not polling.tiers["small"], "the gateway has noticed")
    messages = conversation("Laertes")
    reply = polling.escalate(messages)
    assert (reply.path, reply.report["tier"]) == ("fallback:small_no_usable_worker", "large")
    assert_right(reply, messages)


async def test_transfer_from_a_dead_worker_fails(cluster: Cluster, before: Before, killed: Outcomes) -> None:
    with pytest.raises(WorkerUnavailable):
        await contract.transfer(cluster, before.prefill)


def test_restarted_worker_refuses_old_ids(unpolled: Client, restarted: Before, assert_right: AssertRight) -> None:
    """The unpolled gateway still uses the old epoch's ids."""
    messages = next_turn(FIRST, restarted.first_answer)
    replies = [unpolled.ask(FIRST, "small"), unpolled.ask(messages), unpolled.escalate(conversation("Yorick"))]
    assert replies[0].report["cached_tokens"] == 0
    for reply, wanted in zip(replies, (FIRST, messages, conversation("Yorick")), strict=True):
        assert_right(reply, wanted)
    assert replies[-1].path == "mapped"


def test_polling_gateway_forgets_the_old_epoch(
    cluster: Cluster, polling: Client, restarted: Before, assert_right: AssertRight
) -> None:
    eventually(lambda: polling.tiers["small"], "the gateway has noticed the restart")
    assert polling.metric("worker_restarts_total", target=cluster.id("small")) == 1
    stale = polling.metric("prefix_lookup_stale_total", tier="small")
    reply = polling.escalate(FIRST)
    assert reply.path == "mapped"
    assert_right(reply, FIRST)
    assert polling.metric("prefix_lookup_stale_total", tier="small") == stale, (
        "the old ids are forgotten with their epoch"
    )


async def test_transfer_by_an_old_id_fails(cluster: Cluster, restarted: Before) -> None:
    with pytest.raises(CacheNotFound, match="epoch"):
        await contract.transfer(cluster, restarted.prefill)
    again = await contract.prefill(cluster, COPIED)
    assert again.epoch != restarted.prefill.epoch and again.cache_id != restarted.prefill.cache_id
    assert again.digest == restarted.prefill.digest
    assert (await contract.transfer(cluster, again)).num_tokens > 0
