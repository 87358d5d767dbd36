"""The layout of keys and values in one layer of vLLM's paged cache, and copies between there and `(H, T, D)`.

    [blocks, heads, block_tokens, 2 * head_dim]
    CPU     a head's keys, then its values; within each, packed as the processor's kernels need; written by vLLM's op
    CUDA    a token's key, then its value

A slot is `block * block_tokens + token`. vLLM's op checks no slot, and a wrong one corrupts memory. So slots are made
from block ids that are checked here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.api.errors import TransferFailed
from workers.pool.blocks import check_blocks, check_range

# Writes tokens (T, H, D) of keys and of values into the caches (blocks, H, block_tokens, D), at slots (T,).
WriteOp = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]

_BASE = 128  # digits that every floating-point type represents exactly


@dataclass(frozen=True)
class HeadRange:
    """KV heads `[begin, end)` of the model, held by one worker of a tensor-parallel group."""

    begin: int
    end: int

    @property
    def part(self) -> slice:
        return slice(self.begin, self.end)


def head_range(rank: int, num_ranks: int, num_kv_heads: int) -> HeadRange:
    """Assign heads as vLLM does: an equal run to each rank; with fewer heads than ranks, each head to several ranks."""
    if num_kv_heads % num_ranks and num_ranks % num_kv_heads:
        raise ValueError(f"{num_kv_heads} KV heads cannot be split equally among {num_ranks} ranks")
    if num_kv_heads >= num_ranks:
        size = num_kv_heads // num_ranks
        return HeadRange(rank * size, (rank + 1) * size)
    head = rank * num_kv_heads // num_ranks
    return HeadRange(head, head + 1)


class PagedLayout(ABC):
    """`cache` is always one layer of vLLM's, `blocks` those of one sequence from token 0 on."""

    def write(self, cache: Tensor, blocks: Sequence[int], begin: int, keys: Tensor, values: Tensor) -> None:
        """Write tokens `[begin, begin + T)`, `(H, T, D)` each, of any memory order and dtype."""
        slots = slots_of(cache, blocks, begin, begin + keys.shape[1])
        self._write(cache, slots.to(cache.device), _rows(keys, cache), _rows(values, cache))

    def read(self, cache: Tensor, blocks: Sequence[int], num_tokens: int) -> tuple[Tensor, Tensor]:
        """Copy out the keys and values of the first `num_tokens` tokens, `(H, T, D)`."""
        size = cache.shape[2]
        check_blocks(blocks, cache.shape[0], TransferFailed)
        check_range(blocks, 0, num_tokens, size)
        used = torch.tensor(blocks[: -(-num_tokens // size)], device=cache.device)
        keys, values = self._read(cache.index_select(0, used))  # (blocks, H, block_tokens, D)
        return _sequence(keys)[:, :num_tokens], _sequence(values)[:, :num_tokens]

    @abstractmethod
    def _write(self, cache: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write rows `(T, H, D)` in the cache's dtype at checked slots."""

    @abstractmethod
    def _read(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Split whole blocks `(n, H, block_tokens, 2 * D)` into keys and values `(n, H, block_tokens, D)`."""


class CudaLayout(PagedLayout):
    """The layout of vLLM's FlashAttention backend."""

    def _write(self, cache: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        block, token = slots // cache.shape[2], slots % cache.shape[2]
        cache[block, :, token] = torch.cat([keys, values], dim=-1)

    def _read(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = blocks.chunk(2, dim=-1)
        return keys, values


class CpuLayout(PagedLayout):
    """`write_op` is vLLM's. Its packing is found by writing known numbers with it once, so that neither reading nor
    writing depends on how it packs."""

    def __init__(self, write_op: WriteOp, block_tokens: int, head_dim: int, dtype: torch.dtype):
        self._write_op = write_op
        self._places = _find_places(write_op, block_tokens, head_dim, dtype)  # (block_tokens * D,) of keys, of values

    def _write(self, cache: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        self._write_op(keys, values, *halves(cache), slots)

    def _read(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = (
            half.flatten(2).index_select(2, places).view_as(half)
            for half, places in zip(halves(blocks), self._places, strict=True)
        )
        return keys, values


def halves(cache: Tensor) -> tuple[Tensor, Tensor]:
    """Return the keys' and the values' part of a CPU cache as views `(blocks, H, block_tokens, D)`."""
    num_blocks, heads, size, width = cache.shape
    keys, values = cache.view(num_blocks, heads, 2 * size, width // 2).chunk(2, dim=2)
    return keys, values


def slots_of(cache: Tensor, blocks: Sequence[int], begin: int, end: int) -> Tensor:
    """Return the slots of a sequence's tokens `[begin, end)`. Raises `TransferFailed` or `InvalidRequest` if they are
    not in the cache."""
    size = cache.shape[2]
    check_blocks(blocks, cache.shape[0], TransferFailed)
    check_range(blocks, begin, end, size)
    tokens = torch.arange(begin, end)
    return torch.tensor(blocks, dtype=torch.int64)[tokens // size] * size + tokens % size


def _find_places(write_op: WriteOp, block_tokens: int, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Find where each element of a block, `block_tokens * head_dim` of keys and of values, lies in its half."""
    numbers = torch.arange(block_tokens * head_dim)
    found = torch.zeros(2, len(numbers), dtype=torch.int64)
    scale = 1
    while scale < len(numbers):
        digits = (numbers // scale % _BASE).to(dtype).view(block_tokens, 1, head_dim)
        cache = torch.zeros(1, 1, block_tokens, 2 * head_dim, dtype=dtype)
        write_op(digits, digits, *halves(cache), torch.arange(block_tokens))
        for at, half in enumerate(halves(cache)):
            found[at] += half.flatten().to(torch.int64) * scale
        scale *= _BASE
    if not all(torch.equal(side.sort().values, numbers) for side in found):
        raise TransferFailed("unsupported packing: vLLM's cache does not hold each element exactly once")
    return found[0].argsort(), found[1].argsort()


def _rows(states: Tensor, cache: Tensor) -> Tensor:
    """Convert (H, T, D) to (T, H, D) on the cache's device, in its dtype."""
    return states.transpose(0, 1).to(cache.device, cache.dtype).contiguous()


def _sequence(blocks: Tensor) -> Tensor:
    """Convert (blocks, H, block_tokens, D) to (H, T, D)."""
    return blocks.transpose(0, 1).flatten(1, 2)
