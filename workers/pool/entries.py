"""What the pool stores and hands out: `CacheEntry` (a cache), `Hold` (blocks that a request uses), `Lease` (blocks that
another worker uses)."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType

from workers.api.schemas import Provenance
from workers.digest import common_prefix_len

EXACT: Provenance = "exact"
LEASE_EVENTS = ("granted", "released", "expired", "refused")


def new_cache_id() -> str:
    return f"kvc-{secrets.token_hex(16)}"


@dataclass(frozen=True)
class Span:
    """Tokens `[begin, end)`."""

    begin: int
    end: int


@dataclass(frozen=True)
class CacheEntry:
    """A finished cache. Its blocks are never written again; the last one may be partly filled.

    Tokens inside `mapped`, which may be empty, came from a mapper. Those before it are exact, those after it were
    computed over a mapped cache. Either of the latter two makes the whole cache `mapped:<bundle id>`. `is_hybrid` says
    that its handoff left more to native prefill than it was asked to. `keys` name the full blocks of an exact cache.
    """

    cache_id: str
    token_ids: tuple[int, ...] = field(repr=False)
    blocks: tuple[int, ...] = field(repr=False)
    digest: str
    tenant_salt: str = field(repr=False)
    created_at: float
    expires_at: float
    provenance: Provenance = EXACT
    mapped: Span | None = None
    is_hybrid: bool = False
    keys: tuple[bytes, ...] = field(default=(), repr=False)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def is_exact(self) -> bool:
        return self.provenance == EXACT

    def common_prefix(self, token_ids: Sequence[int]) -> int:
        """Return how many first tokens this cache shares with `token_ids`: as much of it as a request may use."""
        return common_prefix_len(self.token_ids, token_ids)


class Hold:
    """Blocks that do not change until `release`. The first `num_tokens` of their sequence are filled.

    `entry` is the cache that they belong to, if any. A context manager. `release` is idempotent.
    """

    def __init__(
        self,
        blocks: Sequence[int],
        num_tokens: int,
        give_back: Callable[[Sequence[int]], None],
        entry: CacheEntry | None = None,
    ):
        self.blocks = tuple(blocks)
        self.num_tokens = num_tokens
        self.entry = entry
        self._give_back: Callable[[Sequence[int]], None] | None = give_back

    def release(self) -> None:
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back(self.blocks)

    def __enter__(self) -> Hold:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


@dataclass(frozen=True)
class Lease:
    """Another worker's right to read a cache. Its blocks are kept until `expires_at`, even if the cache is dropped."""

    lease_id: str
    entry: CacheEntry
    generations: tuple[int, ...] = field(repr=False)
    expires_at: float


@dataclass(frozen=True)
class PoolStats:
    """Counts at one moment.

    `free_blocks` includes those being cleared. `num_indexed` blocks can be found by their tokens. `num_evictions`,
    `num_recalls` (of caches from a second tier) and `lease_events` (by the names in `LEASE_EVENTS`) count since the
    start; leases are `refused` when too many exist.
    """

    num_blocks: int
    free_blocks: int
    num_caches: int
    num_leases: int
    num_indexed: int
    num_evictions: int
    lease_events: Mapping[str, int]
    tier_blocks: int = 0
    tier_used_blocks: int = 0
    num_recalls: int = 0

    @property
    def used_blocks(self) -> int:
        return self.num_blocks - self.free_blocks

    @property
    def tier_usage(self) -> float:
        """Used fraction of the second tier, 0 to 1."""
        return self.tier_used_blocks / self.tier_blocks if self.tier_blocks else 0.0
