"""A client that hangs up, at whatever moment, leaves both workers and the gateway as it found them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import Right
from tests.e2e.running import Cluster, eventually, request
from tests.e2e.talks import talk

LONG = 5000  # words: to be read in many chunks
ENDLESS = 2000  # tokens


def is_idle(cluster: Cluster) -> bool:
    workers = [cluster.worker_metric(tier, "num_requests_running") for tier in ("small", "large")]
    gateway = [cluster.client.metric(f"num_requests_{state}") for state in ("running", "waiting")]
    return not any([*workers, *gateway])


def usage(cluster: Cluster) -> list[float]:
    """How full the pools are."""
    return [cluster.worker_metric(tier, "kv_cache_usage_perc") for tier in ("small", "large")]


def no_fuller(now: list[float], before: list[float]) -> bool:
    return all(one <= other for one, other in zip(now, before, strict=True))


@pytest.fixture
def undisturbed(cluster: Cluster, right: Right) -> Any:
    """What a hang-up must not change: afterwards nothing runs, nothing more is kept, and the next answer is right."""
    eventually(lambda: is_idle(cluster), "nothing runs")
    before = usage(cluster)
    yield
    eventually(lambda: is_idle(cluster), "nothing runs any more")
    # Fuller than before is what a leak would be; emptier they become as older caches expire.
    eventually(lambda: no_fuller(usage(cluster), before), f"the pools are no fuller than before: {before}")
    asked = talk("Cassio")
    right(cluster.client.ask(asked, "large", no_cache=True), asked)


def hang_up_when(cluster: Cluster, body: dict[str, Any], is_time: Callable[[], Any]) -> None:
    """Sends a request and breaks the connection off when it is time."""

    async def ask_and_leave() -> None:
        async with httpx.AsyncClient(base_url=cluster.client.url, trust_env=False) as http:
            asking = asyncio.create_task(http.post("/v1/chat/completions", json=body, timeout=300))
            await asyncio.to_thread(eventually, is_time, "it is time to hang up")
            assert not asking.done(), "the answer came first"
            asking.cancel()
            await asyncio.wait({asking})

    asyncio.run(ask_and_leave())


def disconnects(cluster: Cluster, tier: str, phase: str) -> float:
    return cluster.worker_metric(tier, "client_disconnects_total", phase=phase)


def test_in_the_middle_of_a_prefill(cluster: Cluster, undisturbed: None) -> None:
    before = disconnects(cluster, "large", "prefill")
    body = request(talk("Emilia", num_words=LONG), "large")
    hang_up_when(cluster, body, lambda: cluster.worker_metric("large", "num_requests_running"))
    eventually(lambda: disconnects(cluster, "large", "prefill") == before + 1, "the worker has noticed")


def test_in_the_middle_of_an_answer_of_which_nothing_was_told(cluster: Cluster, undisturbed: None) -> None:
    before = disconnects(cluster, "large", "decode")
    written = cluster.worker_metric("large", "inter_token_latency_seconds_count")
    body = request(talk("Bianca"), "large") | {"max_tokens": ENDLESS}
    hang_up_when(
        cluster, body, lambda: cluster.worker_metric("large", "inter_token_latency_seconds_count") > written + 2
    )
    eventually(lambda: disconnects(cluster, "large", "decode") == before + 1, "the worker has noticed")


@pytest.mark.parametrize("tier", ["small", "large"])
def test_in_the_middle_of_a_stream(cluster: Cluster, undisturbed: None, tier: str) -> None:
    before = disconnects(cluster, tier, "decode")
    body = request(talk(f"Roderigo {tier}"), tier) | {"max_tokens": ENDLESS, "stream": True}
    with cluster.client.http.stream("POST", "/v1/chat/completions", json=body) as stream:
        assert '"role"' in next(stream.iter_lines())
    eventually(lambda: disconnects(cluster, tier, "decode") == before + 1, "the worker has noticed")
    assert cluster.client.metric("client_disconnects_total", phase="stream") > 0


def test_while_the_small_model_reads_for_a_handoff(cluster: Cluster, undisturbed: None) -> None:
    body = request(talk("Desdemona", num_words=LONG), policy="always_escalate")
    hang_up_when(cluster, body, lambda: cluster.worker_metric("small", "num_requests_running"))


def test_many_at_once(cluster: Cluster, undisturbed: None) -> None:
    def begin_and_leave(number: int) -> None:
        body = request(talk(f"Gratiano {number}"), "large") | {"max_tokens": ENDLESS, "stream": True}
        with httpx.stream("POST", f"{cluster.client.url}/v1/chat/completions", json=body, timeout=300) as stream:
            next(stream.iter_lines())

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(begin_and_leave, range(8)))
