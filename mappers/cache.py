"""KV caches as values: `KVCache`, its shape `KVGeometry`, and `KVChunk`, the interface a mapper reads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from mappers.errors import GeometryMismatch

Kind = Literal["keys", "values"]
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class KVGeometry:
    """Shape of a model's KV cache. Each layer stores `num_kv_heads` keys and values of size `head_dim` per token."""

    num_layers: int
    num_kv_heads: int
    head_dim: int

    @property
    def width(self) -> int:
        """Elements of one token's keys (or values) in one layer."""
        return self.num_kv_heads * self.head_dim


class KVChunk(Protocol):
    """Keys and values of consecutive tokens, in any storage. `KVCache` implements it.

    Keys are post-RoPE. Token i has position `start + i`.
    """

    @property
    def geometry(self) -> KVGeometry: ...

    @property
    def start(self) -> int: ...

    @property
    def num_tokens(self) -> int: ...

    def parts(self, kind: Kind, layer: int) -> Iterable[Tensor]:
        """Yield one layer's keys or values in token order, as tensors (n, t, num_kv_heads, head_dim) of n * t tokens
        each."""


@dataclass(frozen=True)
class KVCache:
    """Keys and values of one sequence, one tensor (num_kv_heads, num_tokens, head_dim) per layer.

    Keys are post-RoPE. Token i has position `start + i`. Raises `GeometryMismatch` for unequal shapes and for
    quantised dtypes.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    start: int = 0

    def __post_init__(self) -> None:
        if not self.keys or len(self.keys) != len(self.values):
            raise GeometryMismatch(
                f"{len(self.keys)} key layers and {len(self.values)} value layers; allowed: an equal number, at least 1"
            )
        shape = self.keys[0].shape
        for layer, (key, value) in enumerate(zip(self.keys, self.values, strict=True)):
            if key.shape != shape or value.shape != shape or len(shape) != 3:
                raise GeometryMismatch(
                    f"layer {layer}: keys {tuple(key.shape)}, values {tuple(value.shape)}; "
                    f"every layer must be (num_kv_heads, num_tokens, head_dim) = {tuple(shape)}"
                )
            if key.dtype not in DTYPES or value.dtype not in DTYPES:
                raise GeometryMismatch(
                    f"layer {layer}: keys of {key.dtype}, values of {value.dtype}; a cache must not be quantised, "
                    f"allowed: {', '.join(map(str, DTYPES))}"
                )

    @property
    def geometry(self) -> KVGeometry:
        heads, _, dim = self.keys[0].shape
        return KVGeometry(len(self.keys), heads, dim)

    def of(self, kind: Kind) -> tuple[Tensor, ...]:
        return self.keys if kind == "keys" else self.values

    def parts(self, kind: Kind, layer: int) -> Iterable[Tensor]:
        """Implement `KVChunk.parts` by a single part (1, num_tokens, num_kv_heads, head_dim)."""
        return (self.of(kind)[layer].transpose(0, 1)[None],)

    @property
    def num_tokens(self) -> int:
        return self.keys[0].shape[1]

    @property
    def positions(self) -> Tensor:
        return torch.arange(self.start, self.start + self.num_tokens, device=self.keys[0].device)

    def slice(self, begin: int, end: int) -> KVCache:
        """Return views of tokens `[begin, end)`, with their positions unchanged."""
        return KVCache(
            tuple(k[:, begin:end] for k in self.keys), tuple(v[:, begin:end] for v in self.values), self.start + begin
        )

    @staticmethod
    def concatenate(parts: Sequence[KVCache]) -> KVCache:
        """Join consecutive parts. Raises `GeometryMismatch` for a gap or an overlap."""
        for left, right in zip(parts, parts[1:], strict=False):
            if right.start != left.start + left.num_tokens:
                raise GeometryMismatch(
                    f"a part that starts at {right.start} cannot follow one that ends at {left.start + left.num_tokens}"
                )
        layers = range(parts[0].geometry.num_layers)
        return KVCache(
            tuple(torch.cat([p.keys[i] for p in parts], dim=1) for i in layers),
            tuple(torch.cat([p.values[i] for p in parts], dim=1) for i in layers),
            parts[0].start,
        )


def rows_of(states: Tensor) -> Tensor:
    """Reshape one layer's keys or values (H, T, D) to one row per token (T, H * D)."""
    return states.transpose(0, 1).flatten(1)
