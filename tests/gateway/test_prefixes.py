"""What a gateway makes of the prefixes that it finds filed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gateway.upstream.tier import Tier
from tests.gateway.stack import MESSAGES, Stack, report


def has_restarted(tier: Tier) -> Callable[[], None]:
    worker = tier.workers["small-0"]
    filed = worker.epoch
    worker.epoch = "a later one"
    return lambda: setattr(worker, "epoch", filed)


def is_unknown(tier: Tier) -> Callable[[], None]:
    worker = tier.workers.pop("small-0")
    return lambda: tier.workers.update({"small-0": worker})


@pytest.mark.parametrize("as_seen", [has_restarted, is_unknown])
async def test_what_is_of_no_use_here_stays_for_other_gateways(
    stack: Stack, as_seen: Callable[[Tier], Callable[[], None]]
) -> None:
    """They may know of a worker, or of its restart, sooner."""

    async def prefix_hit() -> Any:
        reply = await stack.http.post("/v1/cascade/explain", json={"model": "auto", "messages": MESSAGES})
        return reply.json()["prefix"]["small"]

    await stack.chat()
    seen_rightly = as_seen(stack.app.state.gateway.parts.fleet.tiers["small"])
    assert await prefix_hit() is None
    assert stack.metric("registry_ops_total", op="forget", result="ok") == 0
    seen_rightly()
    assert await prefix_hit() is not None
    assert report(await stack.chat())["path"] == "exact"
