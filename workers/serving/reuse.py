"""`Reuse`: how much of a prompt stands in the pool already, and of what kind.

    prompt    |◄──────── num_tokens out of the pool ────────►|◄── read natively, at least one ──►|
    mapped    | head |◄── mapped_tokens ──►|  native over it |

With a cache id, that cache and no other is used, up to the longest common token prefix with this very prompt. Without,
the longest exact prefix is found by its tokens; nothing that came from a mapper, or was read over such, is found so.
Fewer than `MIN_LOADED_TOKENS` are not used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from workers.api.errors import CacheMismatch
from workers.api.schemas import KVTransferParams, Path
from workers.engines.base import MIN_LOADED_TOKENS
from workers.pool.entries import EXACT, Hold
from workers.pool.pool import Pool


@dataclass(frozen=True)
class Reuse:
    """The first `num_tokens` of a prompt, out of the blocks of `hold`; None if nothing can be used."""

    hold: Hold | None = None
    num_tokens: int = 0

    @property
    def provenance(self) -> str:
        entry = self.hold.entry if self.hold else None
        return entry.provenance if entry else EXACT

    @property
    def cached_tokens(self) -> int:
        """Exact hits."""
        return self.num_tokens if self.provenance == EXACT else 0

    @property
    def mapped_tokens(self) -> int:
        """Tokens whose KV a mapper wrote."""
        entry = self.hold.entry if self.hold else None
        if entry is None or entry.mapped is None:
            return 0
        return max(0, min(self.num_tokens, entry.mapped.end) - entry.mapped.begin)

    @property
    def path(self) -> Path:
        if not self.num_tokens:
            return "prefill"
        entry = self.hold.entry if self.hold else None
        if entry is None or entry.is_exact:
            return "exact"
        return "hybrid" if entry.is_hybrid else "mapped"

    def cut(self, num_tokens: int) -> Reuse:
        """What is left of it where no more than so many tokens were used."""
        return self if num_tokens >= self.num_tokens else _from(self.hold, num_tokens)


@contextmanager
def reuse_of(pool: Pool, token_ids: Sequence[int], salt: str, params: KVTransferParams) -> Iterator[Reuse]:
    """What of a prompt can be reused; its blocks stay as they are inside the block. At least one token is left to read.

    Raises `CacheNotFound` and `CacheMismatch` for a cache id that may not serve this prompt.
    """
    limit = min(len(token_ids) - 1, params.num_tokens or len(token_ids))
    if params.cache_id is not None:
        with pool.hold(params.cache_id, salt, require_exact=params.require_exact) as hold:
            yield _from(hold, _usable(hold, token_ids, limit))
    elif params.reuse:
        with pool.match_prefix(token_ids[:limit], salt) as hold:
            yield _from(hold, hold.num_tokens)
    else:
        yield Reuse()


def _from(hold: Hold | None, num_tokens: int) -> Reuse:
    return Reuse(hold, num_tokens) if num_tokens >= MIN_LOADED_TOKENS else Reuse()


def _usable(hold: Hold, token_ids: Sequence[int], limit: int) -> int:
    entry = hold.entry
    assert entry is not None, "a hold by cache id has its cache"
    common = entry.common_prefix(token_ids)
    if common == 0:
        raise CacheMismatch(f"{entry.cache_id} and this prompt have no first token in common", param="cache_id")
    return min(common, limit)
