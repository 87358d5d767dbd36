"""One case, from a fresh gateway to its turns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.gateway.golden.cases import CACHES, ROUTES, Case, apply
from tests.gateway.golden.world import World

Json = dict[str, Any]


async def play(case: Case, folder: Path) -> list[Json]:
    route = ROUTES[case.route]
    world = World(
        folder,
        num_tiers=3 if case.tiers == "3" else 2,
        two_large=case.tiers == "2+1",
        maps_down=case.cache.startswith("above"),
        settings=route.settings,
    )
    async with world.running():
        asked = await CACHES[case.cache](world)
        if case.cache != "none":
            await world.forget_metrics()
        route.prepare(world)
        await apply(world, case.fault)
        body: Json = {"model": "auto"} | asked | route.body
        path = "/v1/chat/completions"
        if route.is_text:
            path, body["prompt"] = "/v1/completions", " ".join(one["content"] for one in body.pop("messages"))
        if case.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return [await world.turn(body, path=path)]
