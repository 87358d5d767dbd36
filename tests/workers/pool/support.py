"""Shared by the tests of pool, transports and handoff: a small layout, random KV, arenas."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mappers.cache import KVCache
from workers.api.schemas import KVLayout
from workers.pool import create_arena, new_epoch
from workers.pool.arena import Arena
from workers.pool.blocks import block_bytes

SALT = "5a" * 16
OTHER_SALT = "b7" * 16
FINGERPRINT = "51" * 32
LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=8, block_tokens=4, dtype="float32")

KINDS = ["inproc", "shm", pytest.param("cuda_ipc", marks=pytest.mark.gpu)]
HOST_KINDS = ["inproc", "shm"]


class ManualClock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def make_arena(kind: str, directory: Path, num_blocks: int = 16, layout: KVLayout = LAYOUT) -> Arena:
    return create_arena(
        kind, layout, num_blocks * block_bytes(layout), worker="test-0", epoch=new_epoch(), directory=directory
    )


def random_kv(begin: int, end: int, seed: int = 0, layout: KVLayout = LAYOUT) -> KVCache:
    generator = torch.Generator().manual_seed(seed)
    shape = (layout.num_layers, 2, layout.num_kv_heads, end - begin, layout.head_dim)
    stack = torch.randn(shape, generator=generator)
    return KVCache(tuple(stack[:, 0].unbind()), tuple(stack[:, 1].unbind()), begin)


def assert_same(left: KVCache, right: KVCache) -> None:
    assert (left.start, left.num_tokens) == (right.start, right.num_tokens)
    for a, b in zip(left.keys + left.values, right.keys + right.values, strict=True):
        torch.testing.assert_close(a.cpu(), b.cpu(), rtol=0, atol=0)
