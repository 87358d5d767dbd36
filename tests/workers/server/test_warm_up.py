"""What an engine does before its worker is ready: if that fails, nothing of the worker stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.workers.engines import tiny
from tests.workers.server.support import SECRET
from workers.api.errors import DeadlineExceeded
from workers.pool.segment import SHM
from workers.serving.worker import build_worker


async def test_a_worker_whose_engine_does_not_get_warm_leaves_nothing(folder: Path) -> None:
    worker = build_worker(tiny.settings_for(folder, id="cold-0"), SECRET)
    assert list(SHM.glob("*-cold-0-*"))

    async def fail() -> None:
        raise DeadlineExceeded("planted")

    worker.engine.warm_up = fail  # type: ignore[method-assign]
    with pytest.raises(DeadlineExceeded, match="planted"):
        async with worker:
            pytest.fail("it is not ready")
    assert not list(SHM.glob("*-cold-0-*"))
