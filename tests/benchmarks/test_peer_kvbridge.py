from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from benchmarks.peer_kvbridge import forward_clock, main
from tests.mappers.pairs import llama


def test_a_folder_without_the_peer_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 1
    assert f"{tmp_path} is no checkout of kvbridge" in capsys.readouterr().err


def test_forward_passes_are_timed_once_however_deep_and_only_while_watched() -> None:
    model, ids = llama(1, 2), torch.tensor([[1, 2, 3]])
    began = time.perf_counter()
    with forward_clock() as clock:
        torch.nn.Linear(2, 2)(torch.zeros(1, 2))
        assert clock.seconds == 0
        model(ids)
    whole = time.perf_counter() - began
    assert 0 < clock.seconds < whole
    counted = clock.seconds
    model(ids)
    assert clock.seconds == counted
