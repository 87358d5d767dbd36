"""Caches: prefill a prefix, transfer a cache from another worker, lease, describe, delete."""

from __future__ import annotations

from fastapi import APIRouter, Request

from workers.api.http.disconnect import until_disconnect
from workers.api.schemas import (
    CacheId,
    CacheInfo,
    LeaseRequest,
    PrefillReply,
    PrefillRequest,
    Ticket,
    TransferReply,
    TransferRequest,
)
from workers.routes.edge import ServedWorker

router = APIRouter(prefix="/v1")


@router.post("/prefix/prefill")
async def prefill(body: PrefillRequest, request: Request, worker: ServedWorker) -> PrefillReply:
    worker.check_model(body.target_model, "target_model")
    on_disconnect = worker.metrics.disconnects.labels("prefill").inc
    return await until_disconnect(worker.prefiller.prefill(body), request.receive, on_disconnect)


@router.post("/cache/transfer")
async def transfer(body: TransferRequest, request: Request, worker: ServedWorker) -> TransferReply:
    worker.check_model(body.target_model, "target_model")
    on_disconnect = worker.metrics.disconnects.labels("transfer").inc
    return await until_disconnect(worker.transfers.transfer(body), request.receive, on_disconnect)


@router.post("/cache/{cache_id}/lease")
async def lease(cache_id: CacheId, body: LeaseRequest, worker: ServedWorker) -> Ticket:
    await worker.recaller.for_lease(cache_id, body.tenant_salt)
    granted = worker.pool.lease(cache_id, body.tenant_salt, ttl_s=body.ttl_s)
    return worker.tickets.ticket(granted)


@router.delete("/cache/{cache_id}/lease/{lease_id}", status_code=204)
async def release(cache_id: CacheId, lease_id: str, worker: ServedWorker) -> None:
    worker.pool.release(cache_id, lease_id)


@router.get("/cache/{cache_id}")
async def describe(cache_id: CacheId, worker: ServedWorker) -> CacheInfo:
    entry = worker.pool.peek(cache_id)
    return CacheInfo(
        cache_id=entry.cache_id,
        num_tokens=entry.num_tokens,
        digest=entry.digest,
        epoch=worker.pool.epoch,
        expires_at=entry.expires_at,
        provenance=entry.provenance,
        model=worker.engine.model.name,
        created_at=entry.created_at,
        num_leases=worker.pool.num_leases(cache_id),
        bytes=len(entry.blocks) * worker.pool.arena.block_bytes,
    )


@router.delete("/cache/{cache_id}", status_code=204)
async def delete(cache_id: CacheId, worker: ServedWorker) -> None:
    worker.pool.discard(cache_id)
