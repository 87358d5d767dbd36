"""Tokens and caches of a `FakeWorker`: tokens are words, a cache is a list of them."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from workers.api.errors import CacheMismatch, CacheNotFound
from workers.api.schemas import Message, Prompt


@dataclass(frozen=True)
class Cache:
    cache_id: str
    tokens: list[str]
    salt: str
    provenance: str
    num_mapped: int
    expires_at: float
    is_hybrid: bool = False


class Caches:
    """The caches of one epoch, with the contract's rules: salts, expiry, exact and mapped."""

    def __init__(self) -> None:
        self.by_id: dict[str, Cache] = {}
        self.epoch = ""
        self.restart()

    def restart(self) -> None:
        self.epoch = secrets.token_hex(8)
        self.by_id.clear()

    def find(self, cache_id: str, salt: str) -> Cache:
        cache = self.by_id.get(cache_id)
        if cache is None or cache.expires_at <= time.time():
            raise CacheNotFound(f"{cache_id} is not known here")
        if cache.salt != salt:
            raise CacheMismatch(f"{cache_id} is another tenant's")
        return cache

    def store(
        self, tokens: list[str], salt: str, provenance: str, num_mapped: int, ttl_s: float, is_hybrid: bool = False
    ) -> Cache:
        cache_id, expires_at = f"kvc-{secrets.token_hex(16)}", time.time() + ttl_s
        cache = Cache(cache_id, tokens, salt, provenance, num_mapped, expires_at, is_hybrid)
        self.by_id[cache.cache_id] = cache
        return cache

    def longest_exact(self, tokens: Sequence[str], salt: str) -> int:
        """Automatic prefix matching: exact caches of this tenant only."""
        candidates = [cache for cache in self.by_id.values() if cache.salt == salt and cache.provenance == "exact"]
        return max((common(cache.tokens, tokens) for cache in candidates), default=0)

    def told(self, cache: Cache) -> dict[str, Any]:
        digest = hashlib.sha256(f"{cache.salt} {' '.join(cache.tokens)}".encode()).hexdigest()
        return {
            "cache_id": cache.cache_id,
            "num_tokens": len(cache.tokens),
            "digest": digest,
            "epoch": self.epoch,
            "expires_at": cache.expires_at,
            "provenance": cache.provenance,
        }


def render(messages: Sequence[Message]) -> list[str]:
    """The prompt's tokens: each message's role and words, then the mark at which the assistant begins."""
    tokens = []
    for message in messages:
        tokens += [f"<{message.role}>", *(message.text.split() if message.text else [])]
    return [*tokens, "<assistant>"]


def tokens_of(prompt: Prompt) -> list[str]:
    return render(prompt.messages) if prompt.messages is not None else (prompt.prefix or "").split()


def common(left: Sequence[str], right: Sequence[str]) -> int:
    """How many first tokens the two share."""
    shared = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        shared += 1
    return shared
