"""Large memory that goes from one sequence to the next: never while anybody looks into it, and one room at most."""

from __future__ import annotations

import pytest
import torch

from workers.engines.transformers.memory import ROUNDED, SMALL, BufferPool

LARGE = (4, SMALL // 4)  # of float32


@pytest.mark.parametrize("shape", [(3, 5), LARGE], ids=["small", "large"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_room_is_a_tensor_like_any_other(shape: tuple[int, int], dtype: torch.dtype) -> None:
    tensor = BufferPool().take(shape, dtype)
    tensor.fill_(2.5)
    assert (tensor.shape, tensor.dtype) == (shape, dtype)
    assert tensor.is_contiguous() and bool((tensor == 2.5).all())


def test_a_room_is_used_again_only_when_no_view_of_it_is_left() -> None:
    rooms = BufferPool()
    first = rooms.take(LARGE, torch.float32)
    at, view = first.data_ptr(), first[1:, :3].fill_(7.0)
    del first
    second = rooms.take(LARGE, torch.float32)
    second.zero_()
    assert second.data_ptr() != at and bool((view == 7.0).all())
    del view
    assert rooms.take(LARGE, torch.float32).data_ptr() == at


def test_a_longer_sequence_gets_a_room_of_its_own_and_leaves_the_larger_one() -> None:
    rooms = BufferPool()
    short = rooms.take((SMALL,), torch.uint8)
    long = rooms.take((2 * ROUNDED,), torch.uint8)
    at = long.data_ptr()
    del long, short  # in whichever order they come back, the larger one is kept
    assert rooms.take((SMALL,), torch.uint8).data_ptr() == at
    assert rooms.take((3 * ROUNDED,), torch.uint8).numel() == 3 * ROUNDED
