"""`PrefixIndex`: exact prefixes by the chain hash of their tokens, block by block.

Only blocks that the model computed itself over blocks that it computed itself enter; what came from a mapper, or was
read over something that did, is found by its cache id alone. An entry goes with its block, so the index never outgrows
the pool.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class _Indexed:
    key: bytes
    cache_id: str


class PrefixIndex:
    def __init__(self) -> None:
        self._blocks_by_key: dict[bytes, list[int]] = {}  # equal contents, the newest last
        self._by_block: dict[int, _Indexed] = {}

    def __len__(self) -> int:
        return len(self._by_block)

    def add(self, keys: Sequence[bytes], blocks: Sequence[int], cache_id: str) -> None:
        """Key i names block i, which that cache uses."""
        for key, block in zip(keys, blocks, strict=False):
            if block not in self._by_block:
                self._blocks_by_key.setdefault(key, []).append(block)
            self._by_block[block] = _Indexed(key, cache_id)

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """The blocks of the longest known prefix."""
        blocks = []
        for key in keys:
            if key not in self._blocks_by_key:
                break
            blocks.append(self._blocks_by_key[key][-1])
        return blocks

    def cache_of(self, block: int) -> str:
        """The cache that last brought this block in."""
        return self._by_block[block].cache_id

    def forget(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            indexed = self._by_block.pop(block, None)
            if indexed is None:
                continue
            equal = self._blocks_by_key[indexed.key]
            equal.remove(block)
            if not equal:
                del self._blocks_by_key[indexed.key]
