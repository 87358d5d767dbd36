"""What clients ask for that manage caches themselves: a prefix read, a cache handed over; each reply names a cache."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from gateway import asks
from gateway.audit import cache_access
from gateway.course import Parts
from gateway.errors import CacheUnknown, NoMapper
from gateway.given_up import Asking
from gateway.patience import patience
from gateway.routing import check_may_use
from gateway.schemas import HandoffRequest, PrefixRequest
from gateway.state.tenants import Tenant
from gateway.transfers import counted
from gateway.turn import Found, guessed_tokens
from gateway.upstream.deadline import Deadline
from gateway.upstream.fleet import Tier
from gateway.upstream.worker import Worker
from workers.api.errors import BundleUnusable, CacheUnusable, InvalidRequest
from workers.api.schemas import CacheReply, Message, PrefillReply, PrefillRequest, TransferReply, TransferRequest

TOLD = {"cache_id", "num_tokens", "digest", "epoch", "expires_at", "provenance"}
TOLD_OF_PREFILL = TOLD | {"cached_tokens", "prefill_ms"}
TOLD_OF_TRANSFER = TOLD | {"mapper", "map_ms", "copy_ms", "total_ms", "bytes", "reused_tokens"}


@dataclass(frozen=True)
class CacheCall:
    """One call about a cache. Raises what may be told to the client as it stands."""

    tenant: Tenant
    parts: Parts
    deadline: Deadline

    async def prefill(self, asked: PrefixRequest) -> dict[str, Any]:
        """Reads the prefix on a worker of the model that is named."""
        tier = self._tier(asked.target_model)
        asking = Asking()
        with self.parts.shares.one(self.tenant.name):
            try:
                with asking:
                    worker, reply = await tier.ask(partial(self._read, asked, asking), patience=patience(self.deadline))
            finally:
                if asking.was_given_up:
                    text = Message(role="user", content=asked.prefix)
                    await self.parts.spent(self.tenant, guessed_tokens([text, *asked.conversation]))
        cache_access(self.tenant, "written", worker=worker.id, cache_id=reply.cache_id, num_tokens=reply.num_tokens)
        await self._keep(worker.id, reply, reply.num_tokens)
        return {"object": "cache", "model": tier.model} | reply.model_dump(include=TOLD_OF_PREFILL)

    async def _read(self, asked: PrefixRequest, asking: Asking, worker: Worker) -> PrefillReply:
        form = {"prefix": asked.prefix} if asked.prefix is not None else {"messages": asked.for_workers}
        request = PrefillRequest(
            **form,
            tools=asked.tools,
            stable_messages=asked.stable_messages,
            tenant_salt=self.tenant.salt,
            ttl_s=asked.ttl_s,
            deadline_ms=asks.left_ms(self.deadline),
        )
        return await worker.prefill(request, self.deadline, asking.begun)

    async def transfer(self, asked: HandoffRequest) -> dict[str, Any]:
        """Maps a cache for another model, which then holds one of its own."""
        target = self._tier(asked.target_model)
        source = await self.parts.caches.find(self.tenant, asked.cache_id, self.parts.fleet)
        if source is None:
            raise _unknown(asked.cache_id)
        self._check_source(asked, source, target)
        with self.parts.shares.one(self.tenant.name):
            worker, reply = await self._mapped(asked, source, target)
        made, count, source_id = reply.cache_id, reply.num_tokens, asked.cache_id
        cache_access(self.tenant, "transferred", worker=worker.id, cache_id=made, num_tokens=count, source=source_id)
        await self._keep(worker.id, reply, count - reply.reused_tokens)
        return {"object": "cache", "model": target.model} | reply.model_dump(include=TOLD_OF_TRANSFER)

    def _tier(self, model: str | None) -> Tier:
        """`auto`, or none, is the smallest that the key may use. Raises `ModelNotFound`, `PermissionDenied`."""
        fleet = self.parts.fleet
        named = fleet.named(model, self.tenant.tiers, "target_model") if model else None
        tier = named or fleet.tiers[self.tenant.tiers[0]]
        check_may_use(self.tenant, tier)
        return tier

    def _check_source(self, asked: HandoffRequest, source: Found, target: Tier) -> None:
        if source.entry.worker in target.workers:
            raise InvalidRequest(f"target_model: {target.model!r} holds this cache already", param="target_model")
        if not source.entry.is_exact:
            raise InvalidRequest(f"cache_id: {asked.cache_id} was mapped itself; a source is exact", param="cache_id")

    async def _mapped(self, asked: HandoffRequest, source: Found, target: Tier) -> tuple[Worker, TransferReply]:
        by = self.deadline
        if asked.deadline_ms is not None:
            by = by.earlier(Deadline.after(asked.deadline_ms / 1000))
        try:
            return await target.ask_to_take_over(partial(self._map, asked, source, by), patience(by))
        except CacheUnusable as error:
            await self.parts.caches.forget(source)
            raise _unknown(asked.cache_id) from error
        except BundleUnusable as error:
            raise NoMapper(f"no mapper {asked.mapper!r} for this cache and {target.model!r} is usable") from error

    async def _map(self, asked: HandoffRequest, source: Found, by: Deadline, worker: Worker) -> TransferReply:
        request = TransferRequest(
            cache_id=source.entry.cache_id,
            source_worker=source.entry.worker,
            mapper=asked.mapper,
            num_tokens=asked.num_tokens,
            native_head=asked.native_head,
            tenant_salt=self.tenant.salt,
            ttl_s=asked.ttl_s,
            deadline_ms=asks.left_ms(by),
        )
        reply, _ = await counted(self.parts.metrics, worker, request, by)
        return reply

    async def _keep(self, worker: str, reply: CacheReply, num_tokens: int) -> None:
        """The id for later calls, and what it has cost."""
        await self.parts.caches.file(self.tenant, worker, reply)
        await self.parts.spent(self.tenant, num_tokens)


def _unknown(cache_id: str) -> CacheUnknown:
    return CacheUnknown(f"cache_id: there is no cache {cache_id}; read its prefix again", param="cache_id")
