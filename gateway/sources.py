"""Caches in a worker's pool that a request goes by: `Read` may be handed over, `Handed` was."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.turn import Found
from gateway.upstream.worker import Worker
from workers.api.schemas import TransferReply


@dataclass(frozen=True)
class Read:
    """A worker's exact cache of the prompt; `found` in the registry, or just read (then `cached_tokens` of it were
    there before)."""

    worker: Worker
    cache_id: str
    num_tokens: int
    found: Found | None = None
    cached_tokens: int = 0


@dataclass(frozen=True)
class Handed:
    """A worker's cache that a transfer made."""

    worker: Worker
    reply: TransferReply
    took_s: float

    @property
    def path(self) -> str:
        """Of an answer over it."""
        return "hybrid" if self.reply.decision == "hybrid" else "mapped"
