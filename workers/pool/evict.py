"""What to evict. A plain function from the caches' order and use to a list of victims."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from workers.pool.entries import CacheEntry


def choose_victims(entries: Iterable[CacheEntry], users: Sequence[int], needed: int) -> list[CacheEntry] | None:
    """The caches to drop, least recently used first, so that `needed` blocks come free; None if no choice frees them.

    `entries` come in that order. `users[b]` counts who uses block b, each cache that holds it being one: a block comes
    free when its last user goes, so a block that a lease or a running request also uses never does. A cache whose going
    turns out to be unnecessary (its blocks are shared, or pinned) is spared.
    """
    dropped: Counter[int] = Counter()
    freed: set[int] = set()
    chosen: list[CacheEntry] = []
    for entry in entries:
        if len(freed) >= needed:
            break
        dropped.update(entry.blocks)
        freed.update(block for block in entry.blocks if dropped[block] == users[block])
        chosen.append(entry)
    if len(freed) < needed:
        return None
    return [entry for entry in reversed(chosen) if not _spared(entry, freed, needed)][::-1]


def _spared(entry: CacheEntry, freed: set[int], needed: int) -> bool:
    """Whether enough comes free without this cache; if so, `freed` loses its blocks."""
    kept = freed.intersection(entry.blocks)
    if len(freed) - len(kept) < needed:
        return False
    freed -= kept
    return True
