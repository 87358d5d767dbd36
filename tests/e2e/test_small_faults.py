"""The small worker is frozen before or after its prefill, or killed in the middle of what it does: requests are
answered in time, and rightly; afterwards they are mapped again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from tests.e2e import contract
from tests.e2e.conftest import Right
from tests.e2e.reference import HEAD, Reference
from tests.e2e.running import NEVER_LOOKS, NUM_TOKENS, REQUEST_S, Client, Cluster, Reply, eventually, request
from tests.e2e.talks import talk
from workers.api.errors import CacheStale, DeadlineExceeded, KvrelayError, TransferFailed, WorkerUnavailable
from workers.digest import token_digest

LONG = 4000  # words: a handoff of many chunks
ENDLESS = 400  # tokens: an answer that is not over before it is broken off


@pytest.fixture(scope="module")
def blind(cluster: Cluster) -> Iterator[Client]:
    """Learns of its workers' fate by its own calls only."""
    with cluster.gateway("faulty", **NEVER_LOOKS) as client:
        yield client


@pytest.fixture(autouse=True)
def whole_again(cluster: Cluster) -> Iterator[None]:
    yield
    if cluster.child("small").ended:
        cluster.start("small")


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


def test_killed_with_work_under_way(cluster: Cluster, blind: Client, right: Right) -> None:
    """A lease that it is asked for, an answer of which nothing was told yet, and one in the middle of its stream."""
    handed, whole, streamed = talk("Othello"), talk("Mercutio"), talk("Tybalt")
    blind.ask(handed, "small")
    accepting = {"policy": {"name": "confidence", "threshold": -50.0, "num_tokens": 1}}
    with cluster.gateway("accepting", **NEVER_LOOKS | accepting) as content, ThreadPoolExecutor(2) as pool:
        with content.http.stream("POST", "/v1/chat/completions", json=endless(streamed, stream=True)) as stream:
            frames = stream.iter_lines()
            assert '"role"' in next(frames)
            wholly = pool.submit(content.post, endless(whole))
            it_writes(cluster)
            with cluster.frozen("small"):
                moved = pool.submit(blind.escalate, handed)
                eventually(lambda: blind.metric("num_requests_running", tier="large"), "the transfer is under way")
                cluster.kill("small")
            told = [line for line in frames if line]
        for reply, asked, num_tokens in ((moved, handed, NUM_TOKENS), (wholly, whole, ENDLESS)):
            assert in_time(reply.result()).told["tier"] == "large"
            right(reply.result(), asked, num_tokens)
    assert moved.result().path == "fallback:worker_unavailable"
    assert wholly.result().path == "fallback:small_worker_unavailable"
    # What was told cannot be taken back: an error, and never another model's text.
    assert '"error"' in told[-1] and "[DONE]" not in "".join(told)
    cluster.start("small")
    is_mapped_again(blind, "Othello", right)


async def test_killed_while_its_cache_is_read(cluster: Cluster, reference: Reference) -> None:
    """The large worker is held in the middle of its copy until the small one is dead. What it reads then is good, or
    told to be not; nothing between."""
    asked = talk("Iago", num_words=LONG)
    read = await contract.prefilled(cluster, asked)
    moving = asyncio.create_task(contract.transferred(cluster, read))
    async with cluster.worker("small") as small:
        while not moving.done() and not (await small.cache(read.cache_id)).num_leases:
            pass
    with cluster.frozen("large"):
        cluster.kill("small")
    cache_id, expected = None, reference.native("large", asked, NUM_TOKENS)
    try:
        moved = await moving
    except KvrelayError as error:
        assert isinstance(error, (TransferFailed, CacheStale, WorkerUnavailable))
    else:
        assert moved.digest == token_digest(reference.prompt(asked)[: moved.num_tokens], contract.SALT)
        cache_id, expected = moved.cache_id, reference.handed_over(asked, moved.num_tokens - HEAD, NUM_TOKENS)
    async with cluster.worker("large") as large:
        answer = await large.chat(contract.chat(asked, cache_id), timeout_s=contract.TIMEOUT_S)
    reference.assert_right(answer, expected)


def endless(asked: list[dict[str, str]], **changes: object) -> dict[str, object]:
    return request(asked) | {"max_tokens": ENDLESS} | changes


def it_writes(cluster: Cluster) -> None:
    """Waits until the small worker has written some tokens more."""
    written = partial(cluster.worker_metric, "small", "inter_token_latency_seconds_count")
    before = written()
    eventually(lambda: written() > before + 3, "it writes")
