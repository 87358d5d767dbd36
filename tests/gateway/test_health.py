"""`/livez`, `/readyz`, `/health`."""

from __future__ import annotations

from tests.gateway.stack import Stack
from workers.api.errors import WorkerUnavailable


async def test_ready_with_every_tier(stack: Stack) -> None:
    for path in ("/readyz", "/health"):
        reply = await stack.http.get(path)
        assert (reply.status_code, reply.json()["tiers"]) == (200, {"small": True, "large": True})


async def test_ready_with_one_usable_tier(stack: Stack) -> None:
    stack.small.fail("info", WorkerUnavailable("gone"))
    await stack.check_health()
    assert (await stack.http.get("/readyz")).json()["tiers"] == {"small": True, "large": True}, "once is no proof"
    await stack.check_health()
    reply = await stack.http.get("/readyz")
    assert (reply.status_code, reply.json()["tiers"]) == (200, {"small": False, "large": True})


async def test_not_ready_without_a_usable_tier(stack: Stack) -> None:
    for worker in (stack.small, stack.large):
        worker.fail("readyz", WorkerUnavailable("draining"))
    await stack.check_health()
    await stack.check_health()
    assert (await stack.http.get("/readyz")).status_code == 503
    assert (await stack.http.get("/livez")).status_code == 200
    refused = await stack.chat()
    assert refused.status_code == 503
    assert refused.headers["retry-after"]
    for worker in (stack.small, stack.large):
        worker.heal()
    await stack.check_health()
    assert (await stack.http.get("/readyz")).status_code == 200


async def test_not_ready_while_draining(stack: Stack) -> None:
    stack.app.state.gateway.is_draining = True
    assert (await stack.http.get("/readyz")).status_code == 503
    assert (await stack.http.get("/livez")).status_code == 200
    assert (await stack.chat()).status_code == 200, "what still comes is still answered"


async def test_head_requests(stack: Stack) -> None:
    for path in ("/livez", "/readyz", "/health", "/metrics"):
        assert (await stack.http.head(path)).status_code == 200
    stack.app.state.gateway.is_draining = True
    assert (await stack.http.head("/readyz")).status_code == 503


async def test_other_methods_are_refused_naming_get(stack: Stack) -> None:
    for path in ("/livez", "/readyz", "/health", "/metrics"):
        refused = await stack.http.options(path)
        assert (refused.status_code, refused.headers["allow"]) == (405, "GET")


async def test_health_calls_no_worker(stack: Stack) -> None:
    before = len(stack.small.calls) + len(stack.large.calls)
    for path in ("/livez", "/readyz", "/health", "/metrics"):
        await stack.http.get(path)
    assert len(stack.small.calls) + len(stack.large.calls) == before
