"""Redis frozen, flushed, killed or filled with lies during a conversation: every answer is right."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
import redis

from tests.e2e.conftest import AssertRight
from tests.e2e.conversations import Messages, conversation, next_turn
from tests.e2e.running import REQUEST_S, Client, Cluster, eventually
from tests.gateway.redis_process import RedisProcess, redis_process


@pytest.fixture(scope="module")
def store(require_tool: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisProcess]:
    with redis_process(require_tool("redis-server"), tmp_path_factory.mktemp("redis")) as process:
        yield process


@pytest.fixture(scope="module")
def client(cluster: Cluster, store: RedisProcess) -> Iterator[Client]:
    with cluster.gateway("over-redis", registry={"url": store.url}) as client:
        yield client


class Conversation:
    """Escalated turns. A turn whose cache is found in the registry needs no handoff."""

    def __init__(self, client: Client, name: str, assert_right: AssertRight):
        self.messages: Messages = conversation(name)
        self._client = client
        self._assert_right = assert_right

    def next_turn_hits(self) -> bool:
        """Whether the previous turn's cache was found. The answer is right and in time either way."""
        reply = self._client.escalate(self.messages)
        self._assert_right(reply, self.messages)
        assert reply.took_s < REQUEST_S and reply.path == "mapped"
        self.messages = next_turn(self.messages, reply.text)
        return reply.report["handoff_tokens"] is None


def test_redis_is_frozen_and_flushed_during_a_conversation(
    store: RedisProcess, client: Client, assert_right: AssertRight
) -> None:
    conversation = Conversation(client, "Benedick", assert_right)
    assert not conversation.next_turn_hits()
    assert conversation.next_turn_hits()

    store.freeze()
    assert not conversation.next_turn_hits()
    assert not conversation.next_turn_hits()
    store.thaw()
    eventually(lambda: registry_answers(client), "the registry is used again")
    conversation.next_turn_hits()
    assert conversation.next_turn_hits()

    with closing(redis.Redis.from_url(store.url)) as direct:
        direct.flushall()
    assert not conversation.next_turn_hits()
    assert conversation.next_turn_hits()


def test_entries_naming_other_caches_are_not_believed(
    store: RedisProcess, client: Client, assert_right: AssertRight
) -> None:
    """Each entry names another conversation's cache and a wrong length."""
    prompts = [conversation(name) for name in ("Beatrice", "Leonato")]
    for one in prompts:
        for model in ("small", "large"):
            client.ask(one, model)
    for one in prompts:
        for model, policy in (("small", None), ("large", None), ("auto", None), ("auto", "always_escalate")):
            swap_entries(store)
            assert_right(client.ask(one, model, policy=policy), one)


def test_entry_calling_a_mapped_cache_exact_is_not_believed(
    store: RedisProcess, client: Client, assert_right: AssertRight
) -> None:
    messages = conversation("Margaret")
    after = next_turn(messages, client.escalate(messages).text)
    with closing(redis.Redis.from_url(store.url)) as direct:
        for key, entry in entries(direct).items():
            direct.set(key, json.dumps(entry | {"provenance": "exact"}), keepttl=True)
    reply = client.ask(after, "large")
    assert reply.path == "fallback:large_cache_mismatch"
    assert_right(reply, after)


def test_redis_is_killed(store: RedisProcess, client: Client, assert_right: AssertRight) -> None:
    conversation = Conversation(client, "Dogberry", assert_right)
    conversation.next_turn_hits()
    store.kill()
    assert not conversation.next_turn_hits()
    assert not conversation.next_turn_hits()
    assert client.http.get("/readyz").status_code == client.http.get("/livez").status_code == 200


def registry_answers(client: Client) -> bool:
    """Whether a small request reads from the registry."""
    before = client.metric("registry_ops_total", op="get", result="ok")
    client.ask([{"role": "user", "content": "Is it there?"}], "small")
    return client.metric("registry_ops_total", op="get", result="ok") > before


def swap_entries(store: RedisProcess) -> None:
    """Give each entry the cache of the same worker's next entry, and a wrong length."""
    with closing(redis.Redis.from_url(store.url)) as direct:
        known = entries(direct)
        for worker in {entry["worker"] for entry in known.values()}:
            mine = [key for key in known if known[key]["worker"] == worker]
            assert len(mine) > 2
            for key, other in zip(mine, mine[1:] + mine[:1], strict=True):
                lie = {"cache_id": known[other]["cache_id"], "digest": known[other]["digest"], "num_tokens": 300}
                direct.set(key, json.dumps(known[key] | lie), keepttl=True)


def entries(direct: redis.Redis) -> dict[bytes, dict[str, Any]]:
    keys: list[Any] = sorted(direct.keys("kvrelay:prefix:*"))
    values: list[Any] = direct.mget(keys)
    return {key: json.loads(value) for key, value in zip(keys, values, strict=True)}
