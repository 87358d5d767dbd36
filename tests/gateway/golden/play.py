"""One row of the table, from a fresh gateway to its turns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.gateway.golden.cases import CASES, Case
from tests.gateway.golden.scripts import SCRIPTS, Script
from tests.gateway.golden.world import World

ROWS: dict[str, Case | Script] = {**CASES, **SCRIPTS}


async def play(name: str, folder: Path) -> list[dict[str, Any]]:
    """The turns that a case or script records."""
    row = ROWS[name]
    world = World(folder, tiers=row.tiers, maps_down=row.maps_down, settings=row.settings)
    async with world.running():
        await row.play(world)
    return world.turns
