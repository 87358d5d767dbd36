"""What a handed-over cache must hold, computed offline: the definition of a right answer on a mapped path."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mappers.cache import KVCache
from mappers.errors import MapperError
from mappers.mapper import Mapper
from mappers.models import read


def replay(
    mapper: Mapper, source_model: Any, target_model: Any, token_ids: Sequence[int], num_tokens: int, head: int = 4
) -> KVCache:
    """The target's cache of the first `num_tokens` tokens after a handoff.

        [0, head)            read natively by the target
        [head, num_tokens)   read by the source, mapped

    What the target reads behind it (the native tail, the answer) attends over this cache at positions from
    `num_tokens` on.
    """
    if not 0 <= head <= num_tokens <= len(token_ids) or num_tokens == 0:
        raise MapperError(f"head {head}, num_tokens {num_tokens}: need 0 <= head <= num_tokens <= {len(token_ids)}")
    parts = []
    if head:
        parts.append(read(target_model, token_ids[:head]))
    if head < num_tokens:
        parts.append(mapper.map(read(source_model, token_ids[:num_tokens]).slice(head, num_tokens)))
    return KVCache.concatenate(parts)
