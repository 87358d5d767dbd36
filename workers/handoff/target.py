"""What a handoff asks of the worker that it goes into, and of the one that it comes from."""

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
    """The calls of the source worker that a handoff makes."""

    async def lease(self, cache_id: str, request: LeaseRequest, *, timeout_s: float) -> Ticket: ...

    async def release(self, cache_id: str, lease_id: str, *, timeout_s: float = 2.0) -> None: ...

    async def drop(self, cache_id: str, *, timeout_s: float = 2.0) -> None: ...


class RunStep(Protocol):
    """Runs one bounded step of work off the event loop, among the steps of other requests.

    When the awaiting task is cancelled, a step that has not begun never runs, and one that runs is waited for before
    the cancellation goes on: its memory may be freed then. `Compute.run` does this.
    """

    def __call__(self, step: Callable[[], Any], /) -> Awaitable[Any]: ...


# Reads the first tokens of a prompt natively, for the tenant of this salt: their KV from position 0, in tensors that
# nobody writes to.
PrefillHead = Callable[[Sequence[int], str], Awaitable[KVCache]]


@dataclass(frozen=True)
class HandoffResult:
    """How one handoff ended, whoever waited for it: `result` is `ok`, an error's code (`internal_error` for a bug),
    or `cancelled`; `reply` is there if it is `ok`. `num_mapped` counts the tokens that went through the mapper."""

    result: str
    seconds: float
    num_mapped: int = 0
    reply: TransferReply | None = None

    @property
    def mapping_s(self) -> float:
        """What the mapped tokens cost: reading the source, mapping, writing."""
        return (self.reply.copy_ms + self.reply.map_ms + self.reply.write_ms) / 1000 if self.reply else 0.0


@dataclass(frozen=True)
class HandoffTarget:
    """What the receiving worker lends to its handoffs. `mappers` gives those usable at the moment of the call,
    `site` tells what it can open. `observe` hears of each handoff once, `transport_failed` of each transport, by its
    kind, that did not open or broke, and why. `costs` tells what reading and handoffs take, as measured; `native_share`
    of a full prefill is what a handoff by cost may take. `max_tokens` is the model's context, None for one without
    end. With `release_source`, a source cache that was handed over is given up at its worker, so that memory peaks at
    source, target and a chunk between; `source_released` hears of it. In a trial, bundles are tried out that are off:
    what they make evicts nothing."""

    pool: Pool
    model: str
    mappers: Callable[[], Sequence[Mapper]]
    prefill_head: PrefillHead
    run_step: RunStep
    readers: Readers
    site: Site
    observe: Callable[[HandoffResult], None] = lambda outcome: None
    transport_failed: Callable[[str, KvrelayError], None] = lambda kind, error: None
    release_source: bool = False
    source_released: Callable[[], None] = lambda: None
    costs: Callable[[], Costs] = Costs
    native_share: float = 0.0
    max_tokens: int | None = None
    chunk_tokens: int = CHUNK_TOKENS
    max_handoffs: int = MAX_HANDOFFS
    is_trial: bool = False
