"""Calls of clients that manage caches themselves: prefill a prefix, transfer a cache. Each reply names a cache."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from gateway.errors import CacheUnknown, CircuitOpen, NoMapper
from gateway.request import bodies
from gateway.request.lookup import PrefixHit
from gateway.request.route import Parts, check_may_use
from gateway.request.run import cache_access, counted_transfer
from gateway.request.steps import wait_budget
from gateway.request.turn import estimate_tokens
from gateway.schemas import HandoffRequest, PrefixRequest
from gateway.state.tenants import Tenant
from gateway.upstream.deadline import Deadline
from gateway.upstream.tier import Tier
from gateway.upstream.worker import Worker
from workers.api.errors import BundleUnusable, CacheUnusable, InvalidRequest
from workers.api.schemas import CacheReply, Message, PrefillReply, PrefillRequest, TransferReply, TransferRequest

REPLY_FIELDS = {"cache_id", "num_tokens", "digest", "epoch", "expires_at", "provenance"}
PREFILL_FIELDS = REPLY_FIELDS | {"cached_tokens", "prefill_ms"}
TRANSFER_FIELDS = REPLY_FIELDS | {"mapper", "map_ms", "copy_ms", "total_ms", "bytes", "reused_tokens"}


@dataclass(frozen=True)
class CacheCall:
    """One call about a cache. Raises what may be sent to the client as it is."""

    tenant: Tenant
    parts: Parts
    deadline: Deadline

    async def prefill(self, asked: PrefixRequest) -> dict[str, Any]:
        """Prefill the prefix on a worker of the named model."""
        tier = self._tier(asked.target_model)
        has_begun = False

        def begin() -> None:
            nonlocal has_begun
            has_begun = True

        with self.parts.shares.one(self.tenant.name):
            try:
                worker, reply = await self._prefill(asked, tier, begin)
            except asyncio.CancelledError:
                if has_begun:  # the client hung up while a worker was at it
                    text = Message(role="user", content=asked.prefix)
                    await self.parts.charge(self.tenant, estimate_tokens([text, *asked.conversation]))
                raise
        cache_access(self.tenant, "written", worker=worker.id, cache_id=reply.cache_id, num_tokens=reply.num_tokens)
        await self._file(worker, reply, reply.num_tokens)
        return {"object": "cache", "model": tier.model} | reply.model_dump(include=PREFILL_FIELDS)

    async def _prefill(
        self, asked: PrefixRequest, tier: Tier, begin: Callable[[], None]
    ) -> tuple[Worker, PrefillReply]:
        prompt = {"prefix": asked.prefix} if asked.prefix is not None else {"messages": asked.for_workers}
        wait = wait_budget(self.deadline)
        while True:
            worker = await tier.choose(wait=wait)
            request = PrefillRequest(
                **prompt,
                tools=asked.tools,
                stable_messages=asked.stable_messages,
                tenant_salt=self.tenant.salt,
                ttl_s=asked.ttl_s,
                deadline_ms=bodies.left_ms(self.deadline),
            )
            with suppress(CircuitOpen):  # another call took the probe
                return worker, await worker.prefill(request, self.deadline, begin)

    async def transfer(self, asked: HandoffRequest) -> dict[str, Any]:
        """Map a cache for another model, which then holds a cache of its own."""
        # 1. Find the source
        target = self._tier(asked.target_model)
        source = await self.parts.caches.find(self.tenant, asked.cache_id, self.parts.fleet)
        if source is None:
            raise _unknown(asked.cache_id)
        if source.entry.worker in target.workers:
            raise InvalidRequest(f"target_model: {target.model!r} holds this cache already", param="target_model")
        if not source.entry.is_exact:
            raise InvalidRequest(f"cache_id: {asked.cache_id} is mapped; a source must be exact", param="cache_id")

        # 2. Transfer
        deadline = self.deadline
        if asked.deadline_ms is not None:
            deadline = deadline.earlier(Deadline.after(asked.deadline_ms / 1000))
        with self.parts.shares.one(self.tenant.name):
            try:
                worker, reply = await self._transfer(asked, source, target, deadline)
            except CacheUnusable as error:
                await self.parts.caches.forget(source)
                raise _unknown(asked.cache_id) from error
            except BundleUnusable as error:
                raise NoMapper(f"no usable mapper {asked.mapper!r} from this cache to {target.model!r}") from error

        # 3. File the new cache
        made, count, source_id = reply.cache_id, reply.num_tokens, asked.cache_id
        cache_access(self.tenant, "transferred", worker=worker.id, cache_id=made, num_tokens=count, source=source_id)
        await self._file(worker, reply, count - reply.reused_tokens)
        return {"object": "cache", "model": target.model} | reply.model_dump(include=TRANSFER_FIELDS)

    async def _transfer(
        self, asked: HandoffRequest, source: PrefixHit, target: Tier, deadline: Deadline
    ) -> tuple[Worker, TransferReply]:
        wait = wait_budget(deadline)
        while True:
            worker = await target.choose_for_transfer(wait)
            request = TransferRequest(
                cache_id=source.entry.cache_id,
                source_worker=source.entry.worker,
                mapper=asked.mapper,
                num_tokens=asked.num_tokens,
                native_head=asked.native_head,
                tenant_salt=self.tenant.salt,
                ttl_s=asked.ttl_s,
                deadline_ms=bodies.left_ms(deadline),
            )
            with suppress(CircuitOpen):
                reply, _ = await counted_transfer(self.parts, worker, request, deadline)
                return worker, reply

    def _tier(self, model: str | None) -> Tier:
        """By default, and for `auto`, the smallest that the key may use. Raises `ModelNotFound`, `PermissionDenied`."""
        fleet = self.parts.fleet
        named = fleet.find(model, self.tenant.tiers, "target_model") if model else None
        tier = named or fleet.tiers[self.tenant.tiers[0]]
        check_may_use(self.tenant, tier)
        return tier

    async def _file(self, worker: Worker, reply: CacheReply, num_tokens: int) -> None:
        """Keep the id for later calls, and charge the tokens."""
        await self.parts.caches.file(self.tenant, worker.id, reply)
        await self.parts.charge(self.tenant, num_tokens)


def _unknown(cache_id: str) -> CacheUnknown:
    return CacheUnknown(f"cache_id: unknown cache {cache_id}; prefill its prefix again", param="cache_id")
