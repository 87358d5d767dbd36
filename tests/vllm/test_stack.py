"""The `tiny` family behind the gateway, with its large model on vLLM as `make up ENGINE=vllm` serves it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from tests.e2e.conftest import AssertRight, assert_right, family, misfit, reference  # noqa: F401 - fixtures
from tests.e2e.conversations import conversation, next_turn
from tests.e2e.running import Cluster, eventually, running, settings_of
from workers.families import Family

FIRST = conversation("Hamlet")
NUM_AT_ONCE = 4

pytestmark = pytest.mark.usefixtures("installed")


@pytest.fixture(scope="module")
def cluster(
    installed: None,
    family: Family,  # noqa: F811
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Cluster]:
    settings = settings_of(family, "vllm")
    for worker in settings["workers"].values():
        if worker["tier"] == "large":
            worker |= {"engine": "vllm", "max_model_len": 2048}
    with running(settings, tmp_path_factory.mktemp("stack")) as cluster:
        yield cluster


def test_next_turn_continues_from_the_handed_over_cache(cluster: Cluster, assert_right: AssertRight) -> None:  # noqa: F811
    reply = cluster.client.escalate(FIRST)
    assert reply.path in ("mapped", "hybrid")
    assert_right(reply, FIRST)
    after = next_turn(FIRST, reply.text)
    second = cluster.client.escalate(after)
    assert second.path in ("mapped", "hybrid")
    assert_right(second, after)


def test_large_model_by_name_is_served_as_on_transformers(
    cluster: Cluster,
    assert_right: AssertRight,  # noqa: F811
) -> None:
    document = conversation("Ophelia")
    assert [(reply := cluster.client.ask(document, "large")).path for _ in range(2)] == ["prefill", "exact"]
    assert_right(reply, document)


def test_answers_are_right_while_the_small_worker_is_killed(cluster: Cluster, assert_right: AssertRight) -> None:  # noqa: F811
    talks = [conversation(name) for name in ("Othello", "Mercutio", "Tybalt", "Iago", "Banquo", "Cassio")]
    with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        futures = [pool.submit(partial(cluster.client.escalate, document)) for document in talks]
        eventually(lambda: any(future.done() for future in futures), "one of them is answered")
        cluster.kill("small")
        replies = [future.result() for future in futures]
    for reply, document in zip(replies, talks, strict=True):
        assert_right(reply, document)
    assert any(reply.path not in ("mapped", "hybrid") for reply in replies)
    cluster.start("small")
    eventually(lambda: cluster.client.tiers["small"], "the gateway has seen it")
    after = conversation("Duncan")
    reply = cluster.client.escalate(after)
    assert reply.path in ("mapped", "hybrid")
    assert_right(reply, after)
