"""What belongs to one request: who asks for what until when, what is known of its prefix, and what came of it."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from gateway.policies import Decision
from gateway.prefix import Chain, num_stable
from gateway.schemas import AskedFor
from gateway.state.registry import Entry
from gateway.state.tenants import Tenant
from gateway.upstream.deadline import Deadline
from workers.api.schemas import MAPPED, KVUsage, Message, PrefillReply, TransferReply

BYTES_PER_TOKEN = 4  # of a prompt that is charged for though no worker came to tell how long it is


@dataclass(frozen=True)
class Found:
    """A cache that a worker of one tier holds of the first `num_messages` messages."""

    key: str
    num_messages: int
    entry: Entry


@dataclass(frozen=True)
class Named:
    """A cache that the client named, to be answered from; `found` is None where it has no such cache."""

    found: Found | None


@dataclass(frozen=True)
class Known:
    """What the registry knows of one prompt for one tier: its chain, and what was found, longest first."""

    chain: Chain
    found: tuple[Found, ...] = ()

    def best(self, *, exact_only: bool = False) -> Found | None:
        return next((one for one in self.found if one.entry.is_exact or not exact_only), None)

    @property
    def whole(self) -> Found | None:
        """A cache of the whole prompt."""
        best = self.best(exact_only=True)
        return best if best is not None and best.num_messages == self.chain.num_messages else None

    def without(self, lost: Found) -> Known:
        return Known(self.chain, tuple(one for one in self.found if one != lost))


@dataclass
class Report:
    """The reply's `kvrelay` field. Times in milliseconds, counts in tokens; what did not happen is null.

    `handoff_tokens` were handed over to the answering model (its native head among them), `mapped_tokens` of what it
    attended over came from a mapper; an early handoff began while the small model still wrote. `prefill_ms` is the
    answering model's own reading.
    """

    tier: str | None = None
    path: str = "prefill"
    policy: str | None = None
    reason: str | None = None
    rule: str | None = None
    forced: bool = False
    confidence: float | None = None
    ttft_ms: float | None = None
    handoff_ttft_ms: float | None = None
    small_prefill_ms: float | None = None
    prefill_ms: float | None = None
    map_ms: float | None = None
    copy_ms: float | None = None
    transfer_ms: float | None = None
    bytes: int | None = None
    handoff_tokens: int | None = None
    early_handoff: bool = False
    mapped_tokens: int | None = None
    cached_tokens: int | None = None
    mapper: str | None = None
    top1_agreement: float | None = None
    full_prefill_ms: float | None = None
    explained: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        self._small_cached: int | None = None

    def decided(self, decision: Decision) -> None:
        self.policy, self.reason, self.forced = decision.policy, decision.reason, decision.forced
        self.rule = decision.rule

    def transferred(self, reply: TransferReply, transfer_ms: float) -> None:
        self.transfer_ms, self.map_ms, self.copy_ms = transfer_ms, reply.map_ms, reply.copy_ms
        self.bytes, self.handoff_tokens, self.mapper = reply.bytes, reply.num_tokens, reply.mapper

    def drop_handoff(self) -> None:
        """The answer will be over something else than what was handed over."""
        self.transfer_ms = self.map_ms = self.copy_ms = self.bytes = self.handoff_tokens = self.mapper = None

    def small_read(self, reply: PrefillReply) -> None:
        self.small_prefill_ms, self._small_cached = reply.prefill_ms, reply.cached_tokens

    def found(self, usage: KVUsage, *, by_small: bool) -> None:
        """From what the worker answers. A fallback stays one, whatever it found cached.

        The small model finds in its cache what it has just read for this very request: that is no hit.
        """
        if not self.fell_back and not (by_small and self._small_cached is not None):
            self.path = usage.path

    def answered(self, usage: KVUsage, *, by_small: bool, may_rename: bool) -> None:
        """What the answering worker tells at the end. The path of a stream stands in its headers already, so it may
        not change any more."""
        if may_rename:
            self.found(usage, by_small=by_small)
        self.prefill_ms, self.mapped_tokens = usage.prefill_ms, usage.mapped_tokens
        if usage.provenance.startswith(MAPPED):  # so too where the cache was mapped for an earlier request
            self.mapper = usage.provenance.removeprefix(MAPPED)
        self.top1_agreement, self.full_prefill_ms = usage.top1_agreement, usage.full_prefill_ms
        just_read = by_small and self._small_cached is not None
        self.cached_tokens = self._small_cached if just_read else usage.cached_tokens

    @property
    def fell_back(self) -> bool:
        return self.path.startswith("fallback:")

    def told(self) -> dict[str, Any]:
        told = dict(vars(self))
        del told["_small_cached"]
        if self.explained is None:
            del told["explained"]
        return told


@dataclass
class Turn:
    """One request under way. `phase` says where it stands, for the day its client hangs up."""

    tenant: Tenant
    request: AskedFor
    deadline: Deadline
    arrived_at: float
    model: str = ""  # the answering model's public name
    phase: str = "admission"
    waited_s: float = 0.0  # for the client's body, and for workers
    overhead_ms: float = 0.0  # up to the first token
    escalated_at: float | None = None
    named: Named | None = None
    is_shadowed: bool = False  # the answer over what was handed over is compared with a native one
    known: dict[str, Known] = field(default_factory=dict)
    report: Report = field(default_factory=Report)

    def __post_init__(self) -> None:
        self.messages: list[Message] = self.request.for_workers
        self.num_stable = num_stable(self.request.conversation)

    @property
    def stores(self) -> bool:
        return not self.request.kvrelay.no_cache

    @property
    def may_map(self) -> bool:
        return self.stores and not self.request.kvrelay.exact

    @property
    def stable_messages(self) -> int | None:
        return self.num_stable or None

    def unread_bytes(self, num_messages: int) -> int:
        """The text behind the first `num_messages`."""
        return num_bytes(self.messages[num_messages:])

    def drop_handoff(self) -> None:
        """The answer will be over something else than what was handed over."""
        self.is_shadowed = False
        self.report.drop_handoff()

    def upstream(self, phase: str) -> Upstream:
        """The block in which workers are at it."""
        self.phase = phase
        return Upstream(self)

    def began(self, at: float) -> None:
        """The first token is there. What until then was neither the client's nor a worker's time is ours."""
        self.phase = "stream"
        self.report.ttft_ms = self.since_arrival_ms(at)
        self.overhead_ms = max(0.0, self.report.ttft_ms - self.waited_s * 1000)

    def since_arrival_ms(self, at: float) -> float:
        return (at - self.arrived_at) * 1000


class Upstream:
    """Time within is the workers', not the gateway's."""

    def __init__(self, turn: Turn):
        self._turn = turn
        self._began_at = time.monotonic()

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._turn.waited_s += time.monotonic() - self._began_at


def num_bytes(messages: Iterable[Message]) -> int:
    """Of their text."""
    return sum(len(message.text.encode()) for message in messages)


def guessed_tokens(messages: Iterable[Message]) -> int:
    return num_bytes(messages) // BYTES_PER_TOKEN
