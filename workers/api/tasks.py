"""How much runs at once in this process: what workers and gateway alike tell in their metrics."""

from __future__ import annotations

import asyncio


def num_tasks() -> int:
    """Tasks of the running event loop; 0 where none runs."""
    try:
        return len(asyncio.all_tasks())
    except RuntimeError:
        return 0
