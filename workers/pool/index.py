"""`PrefixIndex`: exact prefixes by the chain hash of their tokens, block by block.

Only blocks that the model computed itself over blocks that it computed itself enter; what came from a mapper, or was
read over something that did, is found by its cache id alone. An entry goes with its block, so the index never outgrows
the pool.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class PrefixIndex:
    def __init__(self) -> None:
        self._block_by_key: dict[bytes, int] = {}
        self._key_by_block: dict[int, bytes] = {}
        self._cache_by_block: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self._block_by_key)

    def add(self, keys: Sequence[bytes], blocks: Sequence[int], cache_id: str) -> None:
        """Key i names block i, which that cache uses. Of two blocks with one key the newer is kept: it lives longer."""
        for key, block in zip(keys, blocks, strict=False):
            before = self._block_by_key.get(key)
            if before is not None:
                self._key_by_block.pop(before)
            self._block_by_key[key] = block
            self._key_by_block[block] = key
            self._cache_by_block[block] = cache_id

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """The blocks of the longest known prefix."""
        blocks = []
        for key in keys:
            block = self._block_by_key.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def cache_of(self, block: int) -> str:
        """The cache that last brought this block in."""
        return self._cache_by_block[block]

    def forget(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._cache_by_block.pop(block, None)
            key = self._key_by_block.pop(block, None)
            if key is not None:
                del self._block_by_key[key]
