"""Paged blocks: written KV is read back under any packing, and no other block is touched."""

from __future__ import annotations

import pytest
import torch

from tests.vllm.support import NUM_PAGED, PAGED_TOKENS, packed_write
from workers.api.errors import KvrelayError, TransferFailed
from workers.engines.vllm.paged import CpuLayout, CudaLayout, PagedLayout

HEADS, DIM = 3, 8


def layout_of(kind: str, dtype: torch.dtype) -> PagedLayout:
    return CudaLayout() if kind == "cuda" else CpuLayout(packed_write, PAGED_TOKENS, DIM, dtype)


def cache_of(dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    return torch.zeros(NUM_PAGED, HEADS, PAGED_TOKENS, 2 * DIM, dtype=dtype, device=device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("kind", "device"), [("cpu", "cpu"), ("cuda", "cpu"), pytest.param("cuda", "cuda", marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize("cut", [0, 3, 8])
def test_kv_written_in_two_pieces_is_read_back(kind: str, device: str, dtype: torch.dtype, cut: int) -> None:
    cache, blocks, num_tokens = cache_of(dtype, device), [7, 0, 31, 2], 14
    layout = layout_of(kind, dtype)
    keys, values = torch.randn(2, HEADS, num_tokens, DIM, device=device).to(dtype)
    layout.write(cache, blocks, 0, keys[:, :cut], values[:, :cut])
    layout.write(cache, blocks, cut, keys[:, cut:], values[:, cut:])
    for expected, found in zip((keys, values), layout.read(cache, blocks, num_tokens), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    untouched = [block for block in range(NUM_PAGED) if block not in blocks]
    assert not cache[untouched].any()


@pytest.mark.parametrize(("blocks", "begin"), [([1, NUM_PAGED], 0), ([-1, 2], 0), ([1, 2], 5), ([1], 0)])
def test_invalid_slot_is_rejected_before_the_operation(blocks: list[int], begin: int) -> None:
    calls: list[int] = []

    def count(*_: torch.Tensor) -> None:
        calls.append(1)

    layout = CpuLayout(packed_write, PAGED_TOKENS, DIM, torch.float32)
    layout._write_op = count
    rows = torch.zeros(HEADS, 2 * PAGED_TOKENS, DIM)
    with pytest.raises(KvrelayError):
        layout.write(cache_of(torch.float32), blocks, begin, rows, rows)
    assert not calls


def test_packing_that_loses_elements_is_rejected() -> None:
    def only_keys(keys: torch.Tensor, values: torch.Tensor, *rest: torch.Tensor) -> None:
        packed_write(keys, torch.zeros_like(values), *rest)

    with pytest.raises(TransferFailed, match="packing"):
        CpuLayout(only_keys, PAGED_TOKENS, DIM, torch.float32)
