from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.workers.pool.support import FINGERPRINT, KINDS, ManualClock, make_arena
from workers.pool.arena import Arena
from workers.pool.pool import Pool

torch.set_num_threads(1)


@pytest.fixture(params=KINDS)
def arena(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Arena]:
    arena = make_arena(request.param, tmp_path)
    yield arena
    arena.close()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def pool(arena: Arena, clock: ManualClock) -> Iterator[Pool]:
    pool = Pool(arena, FINGERPRINT, clock=clock, max_leases=4)
    yield pool
    pool.close()
