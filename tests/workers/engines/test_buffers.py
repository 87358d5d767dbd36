"""`BufferPool`: a buffer is reused only after its last view is gone, and at most one is kept."""

from __future__ import annotations

import pytest
import torch

from workers.engines.transformers.memory import HUGE_PAGE_BYTES, ROUNDING_BYTES, BufferPool

LARGE = (4, HUGE_PAGE_BYTES // 4)  # of float32


@pytest.mark.parametrize("shape", [(3, 5), LARGE], ids=["small", "large"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_buffer_is_an_ordinary_tensor(shape: tuple[int, int], dtype: torch.dtype) -> None:
    tensor = BufferPool().take(shape, dtype)
    tensor.fill_(2.5)
    assert (tensor.shape, tensor.dtype) == (shape, dtype)
    assert tensor.is_contiguous() and bool((tensor == 2.5).all())


def test_buffer_is_reused_after_its_last_view() -> None:
    pool = BufferPool()
    first = pool.take(LARGE, torch.float32)
    address, view = first.data_ptr(), first[1:, :3].fill_(7.0)
    del first
    second = pool.take(LARGE, torch.float32)
    second.zero_()
    assert second.data_ptr() != address and bool((view == 7.0).all())
    del view
    assert pool.take(LARGE, torch.float32).data_ptr() == address


def test_largest_buffer_is_kept() -> None:
    pool = BufferPool()
    short = pool.take((HUGE_PAGE_BYTES,), torch.uint8)
    long = pool.take((2 * ROUNDING_BYTES,), torch.uint8)
    address = long.data_ptr()
    del long, short  # the larger one is kept, in whichever order they return
    assert pool.take((HUGE_PAGE_BYTES,), torch.uint8).data_ptr() == address
    assert pool.take((3 * ROUNDING_BYTES,), torch.uint8).numel() == 3 * ROUNDING_BYTES
