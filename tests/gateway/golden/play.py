"""Play one row of the table against a fresh gateway."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.gateway.golden.cases import CASES, Case
from tests.gateway.golden.scripts import SCRIPTS, Script
from tests.gateway.golden.world import World

ROWS: dict[str, Case | Script] = {**CASES, **SCRIPTS}


async def play(name: str, folder: Path) -> list[dict[str, Any]]:
    """Play a case or script and return the turns that it records."""
    row = ROWS[name]
    world = World(folder, tiers=row.tiers, maps_down=row.maps_down, settings=row.settings)
    async with world.running():
        await row.play(world)
    return world.turns
