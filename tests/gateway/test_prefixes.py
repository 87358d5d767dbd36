"""Registered prefixes that a gateway cannot use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gateway.upstream.tier import Tier
from tests.gateway.stack import MESSAGES, Stack, report


def set_later_epoch(tier: Tier) -> Callable[[], None]:
    worker = tier.workers["small-0"]
    epoch = worker.epoch
    worker.epoch = "later"
    return lambda: setattr(worker, "epoch", epoch)


def remove_worker(tier: Tier) -> Callable[[], None]:
    worker = tier.workers.pop("small-0")
    return lambda: tier.workers.update({"small-0": worker})


@pytest.mark.parametrize("change_view", [set_later_epoch, remove_worker])
async def test_unusable_prefixes_are_kept_for_other_gateways(
    stack: Stack, change_view: Callable[[Tier], Callable[[], None]]
) -> None:
    """Another gateway may learn of a worker, or of its restart, earlier."""

    async def prefix_hit() -> Any:
        reply = await stack.http.post("/v1/cascade/explain", json={"model": "auto", "messages": MESSAGES})
        return reply.json()["prefix"]["small"]

    await stack.chat()
    restore_view = change_view(stack.app.state.gateway.parts.fleet.tiers["small"])
    assert await prefix_hit() is None
    assert stack.metric("registry_ops_total", op="forget", result="ok") == 0
    restore_view()
    assert await prefix_hit() is not None
    assert report(await stack.chat())["path"] == "exact"
