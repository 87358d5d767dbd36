"""The caches that clients know by id, and where they are.

An id is filed in the registry under a hash that the tenant's salt goes into: another tenant's id is as unknown as one
that never was. As with all that the registry holds, a loss is a miss, and the worker has the last word.
"""

from __future__ import annotations

import hashlib
import hmac

from gateway.prefixes import entry_of
from gateway.state.registry import Registry
from gateway.state.tenants import Tenant
from gateway.turn import Found
from gateway.upstream.fleet import Fleet
from workers.api.schemas import CacheReply


class ClientCaches:
    def __init__(self, registry: Registry):
        self._registry = registry

    async def file(self, tenant: Tenant, worker: str, reply: CacheReply) -> None:
        entry = entry_of(tenant, worker, reply.num_tokens, reply.expires_at, reply)
        await self._registry.put_many({_key(tenant, reply.cache_id): entry})

    async def find(self, tenant: Tenant, cache_id: str, fleet: Fleet) -> Found | None:
        """The tenant's cache of that id; None where it has none, or its worker restarted since, is gone or drained."""
        key = _key(tenant, cache_id)
        (entry,) = await self._registry.get_many([key])
        worker = fleet.worker(entry.worker) if entry is not None and entry.tenant == tenant.name else None
        if entry is None or worker is None or worker.is_drained or worker.epoch not in (None, entry.epoch):
            return None
        return Found(key, 0, entry)

    async def forget(self, lost: Found) -> None:
        await self._registry.forget(lost.key, lost.entry)


def _key(tenant: Tenant, cache_id: str) -> str:
    return hmac.new(bytes.fromhex(tenant.salt), f"client-cache|{cache_id}".encode(), hashlib.sha256).hexdigest()
