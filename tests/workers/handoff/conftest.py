from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.workers.handoff.support import Pair, make_pair

torch.set_num_threads(1)


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = make_pair()
    yield pair
    pair.close()
