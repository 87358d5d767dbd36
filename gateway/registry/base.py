"""Where prefixes are remembered: chain hash -> the cache that a worker holds of it.

What stands here is a hint. A loss is a miss, a stale entry is noticed by its epoch or refused by the worker; no
operation raises, and none costs a request more than its configured time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from workers.api.schemas import CacheId, Digest, Provenance

if TYPE_CHECKING:
    from gateway.registry.guarded import GuardedRedis


@dataclass(frozen=True)
class Entry:
    """One cache of one prefix. `num_tokens` counts the tokens of the messages that it is filed under. Who reads one
    from elsewhere checks it."""

    cache_id: CacheId
    worker: str
    epoch: str
    tenant: str
    num_tokens: Annotated[int, Field(ge=0)]
    provenance: Provenance
    expires_at: float
    digest: Digest | None = None

    @property
    def is_exact(self) -> bool:
        return self.provenance == "exact"


class Registry(ABC):
    """Every method returns within the configured time, whatever happens; the outcome goes to `on_op(op, result)`."""

    @property
    def redis(self) -> GuardedRedis | None:
        """Where it is shared, for what else the gateways share; None in this process."""
        return None

    @abstractmethod
    async def get_many(self, keys: Sequence[str]) -> list[Entry | None]:
        """The entries, in the order of `keys`; None for what is absent, expired or unreadable."""

    @abstractmethod
    async def put_many(self, entries: Mapping[str, Entry]) -> None:
        """Files the entries until each expires. An entry that is already there is replaced."""

    @abstractmethod
    async def forget(self, key: str, entry: Entry) -> None:
        """Deletes the entry, unless another cache stands under `key` by now."""

    @abstractmethod
    async def aclose(self) -> None: ...
