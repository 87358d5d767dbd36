"""`Heads`: the first few tokens of prompts, read natively for handoffs, and kept.

A tenant's prompts begin alike, with the chat template's own tokens and the first word of a system prompt, and reading
four tokens takes as long as fetching all weights from memory. What is kept is exact, in tensors apart from any pool.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from mappers.cache import KVCache
from workers.engines.admission import Claim
from workers.engines.base import Engine

MAX_KEPT = 64
MAX_KEPT_TOKENS = 16  # of a longer head the next prompt will have another


class Heads:
    """For use on one event loop. Heads are looked up by all their tokens and the tenant's salt."""

    def __init__(self, engine: Engine, *, priority: int):
        self._engine = engine
        self._priority = priority
        self._kept: OrderedDict[tuple[str, tuple[int, ...]], KVCache] = OrderedDict()

    async def read(self, token_ids: Sequence[int], salt: str) -> KVCache:
        """The KV of these tokens from position 0 on. Nobody writes to it."""
        key = (salt, tuple(token_ids))
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        head = await self._read(token_ids)
        if len(token_ids) <= MAX_KEPT_TOKENS:
            self._kept[key] = head
            if len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        return head

    async def _read(self, token_ids: Sequence[int]) -> KVCache:
        async with self._engine.sequence(Claim(priority=self._priority), len(token_ids)) as sequence:
            await sequence.read(token_ids)
            await sequence.fetch(0)
            kv = sequence.kv(0, len(token_ids))
            return KVCache(tuple(key.clone() for key in kv.keys), tuple(value.clone() for value in kv.values))
