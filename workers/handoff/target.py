"""The interfaces of a handoff: what it needs of the worker that receives the cache, and of the one that has it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mappers.cache import KVCache
from mappers.mapper import Mapper
from workers.api.errors import KvrelayError
from workers.api.schemas import LeaseRequest, Site, Ticket, TransferReply
from workers.pool.pool import Pool
from workers.rates import Costs
from workers.transports.readers import Readers

CHUNK_TOKENS = 512
MAX_HANDOFFS = 16


class SourcePeer(Protocol):
    """The source worker's calls that a handoff uses."""

    async def lease(self, cache_id: str, request: LeaseRequest, *, timeout_s: float) -> Ticket: ...

    async def release(self, cache_id: str, lease_id: str, *, timeout_s: float = 2.0) -> None: ...

    async def drop(self, cache_id: str, *, timeout_s: float = 2.0) -> None: ...


class RunStep(Protocol):
    """Runs one bounded step off the event loop, among the steps of other requests. `Compute.run` does this.

    If the awaiting task is cancelled, a queued step never runs, and a running one is awaited before the cancellation
    continues: its memory may be freed then.
    """

    def __call__(self, step: Callable[[], Any], /) -> Awaitable[Any]: ...


# Prefills the first tokens of a prompt for the tenant of this salt. Returns their KV from position 0, in tensors that
# are never written to again.
PrefillHead = Callable[[Sequence[int], str], Awaitable[KVCache]]


@dataclass(frozen=True)
class HandoffResult:
    """How one handoff ended, whatever the number of its callers.

    `result` is `ok`, an error's code (`internal_error` for a bug) or `cancelled`. `reply` is set if it is `ok`.
    `num_mapped` counts the tokens that were mapped.
    """

    result: str
    seconds: float
    num_mapped: int = 0
    reply: TransferReply | None = None

    @property
    def mapping_s(self) -> float:
        """Seconds spent on the mapped tokens: copying from the source, mapping, writing."""
        return (self.reply.copy_ms + self.reply.map_ms + self.reply.write_ms) / 1000 if self.reply else 0.0


@dataclass(frozen=True)
class HandoffTarget:
    """What the receiving worker provides to its handoffs.

    `mappers` returns the mappers that are usable now, `site` says what the worker can open. `observe` is called once
    for each handoff, `transport_failed` for each transport that fails to open or breaks, with its kind and the error.
    `costs` returns the measured costs of prefill and handoffs; a handoff by cost may take `native_share` of a full
    prefill. `max_tokens` is the model's context, None if unlimited.

    With `release_source`, the source worker drops a cache that was handed over, and `source_released` is called. Memory
    then peaks at source, target and one chunk. In a trial (`is_trial`), bundles that are off are tried out: the caches
    that they make evict nothing.
    """

    pool: Pool
    model: str
    mappers: Callable[[], Sequence[Mapper]]
    prefill_head: PrefillHead
    run_step: RunStep
    readers: Readers
    site: Site
    observe: Callable[[HandoffResult], None] = lambda result: None
    transport_failed: Callable[[str, KvrelayError], None] = lambda kind, error: None
    release_source: bool = False
    source_released: Callable[[], None] = lambda: None
    costs: Callable[[], Costs] = Costs
    native_share: float = 0.0
    max_tokens: int | None = None
    chunk_tokens: int = CHUNK_TOKENS
    max_handoffs: int = MAX_HANDOFFS
    is_trial: bool = False
