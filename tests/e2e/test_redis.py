"""A real Redis frozen, flushed, killed and lied to in the middle of a conversation: every answer is right."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
import redis

from tests.e2e.conftest import Right
from tests.e2e.running import REQUEST_S, Client, Cluster, eventually
from tests.e2e.talks import Talk, carried_on, talk
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
    """Escalated turns. A turn that finds its own cache in the registry needs no handoff."""

    def __init__(self, client: Client, name: str, right: Right):
        self.messages: Talk = talk(name)
        self._client = client
        self._right = right
        self._has_begun = False

    def next_is_found(self) -> bool:
        """Whether the cache of the turn before was found. The answer is right, and in time, in either case."""
        reply = self._client.escalate(self.messages)
        self._right(reply, self.messages)
        assert reply.took_s < REQUEST_S and reply.path == "mapped"
        self.messages = carried_on(self.messages, reply.text)
        return reply.told["handoff_tokens"] is None


def test_a_conversation_over_a_redis_that_comes_and_goes(store: RedisProcess, client: Client, right: Right) -> None:
    turn = Conversation(client, "Benedick", right)
    assert not turn.next_is_found()
    assert turn.next_is_found()

    store.freeze()
    assert not turn.next_is_found()
    assert not turn.next_is_found()
    store.thaw()
    eventually(lambda: registry_answers(client), "the registry is asked again")
    turn.next_is_found()
    assert turn.next_is_found()

    with closing(redis.Redis.from_url(store.url)) as direct:
        direct.flushall()
    assert not turn.next_is_found()
    assert turn.next_is_found()


def test_entries_that_name_other_caches(store: RedisProcess, client: Client, right: Right) -> None:
    """Each entry names another conversation's cache, and another length: hints, and none of them is believed."""
    talks = [talk(name) for name in ("Beatrice", "Leonato")]
    for one in talks:
        for model in ("small", "large"):
            client.ask(one, model)
    for one in talks:
        for model, policy in (("small", None), ("large", None), ("auto", None), ("auto", "always_escalate")):
            exchange(store)
            right(client.ask(one, model, policy=policy), one)


def test_an_entry_that_calls_a_mapped_cache_exact(store: RedisProcess, client: Client, right: Right) -> None:
    asked = talk("Margaret")
    after = carried_on(asked, client.escalate(asked).text)
    with closing(redis.Redis.from_url(store.url)) as direct:
        for key, entry in entries(direct).items():
            direct.set(key, json.dumps(entry | {"provenance": "exact"}), keepttl=True)
    reply = client.ask(after, "large")
    assert reply.path == "fallback:large_cache_mismatch"
    right(reply, after)


def test_killed(store: RedisProcess, client: Client, right: Right) -> None:
    turn = Conversation(client, "Dogberry", right)
    turn.next_is_found()
    store.kill()
    assert not turn.next_is_found()
    assert not turn.next_is_found()
    assert client.http.get("/readyz").status_code == client.http.get("/livez").status_code == 200


def registry_answers(client: Client) -> bool:
    """Asks something small, and looks whether the registry was asked for it."""
    before = client.metric("registry_ops_total", op="get", result="ok")
    client.ask([{"role": "user", "content": "Is it there?"}], "small")
    return client.metric("registry_ops_total", op="get", result="ok") > before


def exchange(store: RedisProcess) -> None:
    """Gives every entry the cache of the next one of the same worker, and a length that is wrong."""
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
