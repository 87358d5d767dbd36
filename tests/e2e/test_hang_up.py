"""A client that disconnects at any moment leaves the workers and the gateway as they were."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import AssertRight
from tests.e2e.conversations import conversation
from tests.e2e.running import Cluster, eventually, request

LONG = 5000  # words: a prefill of many chunks
ENDLESS = 2000  # tokens


def is_idle(cluster: Cluster) -> bool:
    workers = [cluster.worker_metric(tier, "num_requests_running") for tier in ("small", "large")]
    gateway = [cluster.client.metric(f"num_requests_{state}") for state in ("running", "waiting")]
    return not any([*workers, *gateway])


def pool_usage(cluster: Cluster) -> list[float]:
    return [cluster.worker_metric(tier, "kv_cache_usage_perc") for tier in ("small", "large")]


def no_fuller(now: list[float], before: list[float]) -> bool:
    return all(one <= other for one, other in zip(now, before, strict=True))


@pytest.fixture
def no_leak(cluster: Cluster, assert_right: AssertRight) -> Any:
    """Assert that afterwards nothing runs, the pools are no fuller, and the next answer is right."""
    eventually(lambda: is_idle(cluster), "nothing runs")
    before = pool_usage(cluster)
    yield
    eventually(lambda: is_idle(cluster), "nothing runs any more")
    # Emptier is fine: older caches expire.
    eventually(lambda: no_fuller(pool_usage(cluster), before), f"the pools are no fuller than before: {before}")
    messages = conversation("Cassio")
    assert_right(cluster.client.ask(messages, "large", no_cache=True), messages)


def disconnect_when(cluster: Cluster, body: dict[str, Any], is_time: Callable[[], Any]) -> None:
    """Send a request, and close the connection when `is_time`."""

    async def ask_and_disconnect() -> None:
        async with httpx.AsyncClient(base_url=cluster.client.url, trust_env=False) as http:
            request_task = asyncio.create_task(http.post("/v1/chat/completions", json=body, timeout=300))
            await asyncio.to_thread(eventually, is_time, "it is time to disconnect")
            assert not request_task.done(), "the answer came first"
            request_task.cancel()
            await asyncio.wait({request_task})

    asyncio.run(ask_and_disconnect())


def disconnects(cluster: Cluster, tier: str, phase: str) -> float:
    return cluster.worker_metric(tier, "client_disconnects_total", phase=phase)


def test_disconnect_during_a_prefill(cluster: Cluster, no_leak: None) -> None:
    before = disconnects(cluster, "large", "prefill")
    body = request(conversation("Emilia", num_words=LONG), "large")
    disconnect_when(cluster, body, lambda: cluster.worker_metric("large", "num_requests_running"))
    eventually(lambda: disconnects(cluster, "large", "prefill") == before + 1, "the worker has noticed")


def test_disconnect_during_a_whole_answer(cluster: Cluster, no_leak: None) -> None:
    before = disconnects(cluster, "large", "decode")
    written = cluster.worker_metric("large", "inter_token_latency_seconds_count")
    body = request(conversation("Bianca"), "large") | {"max_tokens": ENDLESS}
    disconnect_when(
        cluster, body, lambda: cluster.worker_metric("large", "inter_token_latency_seconds_count") > written + 2
    )
    eventually(lambda: disconnects(cluster, "large", "decode") == before + 1, "the worker has noticed")


@pytest.mark.parametrize("tier", ["small", "large"])
def test_disconnect_during_a_stream(cluster: Cluster, no_leak: None, tier: str) -> None:
    before = disconnects(cluster, tier, "decode")
    body = request(conversation(f"Roderigo {tier}"), tier) | {"max_tokens": ENDLESS, "stream": True}
    with cluster.client.http.stream("POST", "/v1/chat/completions", json=body) as stream:
        assert '"role"' in next(stream.iter_lines())
    eventually(lambda: disconnects(cluster, tier, "decode") == before + 1, "the worker has noticed")
    assert cluster.client.metric("client_disconnects_total", phase="stream") > 0


def test_disconnect_during_the_small_prefill_of_a_handoff(cluster: Cluster, no_leak: None) -> None:
    body = request(conversation("Desdemona", num_words=LONG), policy="always_escalate")
    disconnect_when(cluster, body, lambda: cluster.worker_metric("small", "num_requests_running"))


def test_many_disconnects_at_once(cluster: Cluster, no_leak: None) -> None:
    def start_and_disconnect(number: int) -> None:
        body = request(conversation(f"Gratiano {number}"), "large") | {"max_tokens": ENDLESS, "stream": True}
        with httpx.stream("POST", f"{cluster.client.url}/v1/chat/completions", json=body, timeout=300) as stream:
            next(stream.iter_lines())

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(start_and_disconnect, range(8)))
