"""Caches: prefill a prefix, transfer a cache from another worker, lease, describe, delete."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from workers.api.http.disconnect import until_disconnect
from workers.api.http.replies import json_reply
from workers.api.schemas import CacheId, CacheInfo, LeaseRequest, PrefillRequest, TransferRequest
from workers.serving.worker import Worker

router = APIRouter(prefix="/v1")


@router.post("/prefix/prefill")
async def prefill(body: PrefillRequest, request: Request) -> Response:
    worker: Worker = request.app.state.worker
    worker.check_model(body.target_model, "target_model")
    on_disconnect = worker.metrics.disconnects.labels("prefill").inc
    return json_reply(await until_disconnect(worker.prefiller.prefill(body), request.receive, on_disconnect))


@router.post("/cache/transfer")
async def transfer(body: TransferRequest, request: Request) -> Response:
    worker: Worker = request.app.state.worker
    worker.check_model(body.target_model, "target_model")
    on_disconnect = worker.metrics.disconnects.labels("transfer").inc
    return json_reply(await until_disconnect(worker.transfers.transfer(body), request.receive, on_disconnect))


@router.post("/cache/{cache_id}/lease")
async def lease(cache_id: CacheId, body: LeaseRequest, request: Request) -> Response:
    worker: Worker = request.app.state.worker
    await worker.recalls.for_lease(cache_id, body.tenant_salt)
    granted = worker.pool.lease(cache_id, body.tenant_salt, ttl_s=body.ttl_s)
    return json_reply(worker.tickets.ticket(granted))


@router.delete("/cache/{cache_id}/lease/{lease_id}")
async def release(cache_id: CacheId, lease_id: str, request: Request) -> Response:
    worker: Worker = request.app.state.worker
    worker.pool.release(cache_id, lease_id)
    return Response(status_code=204)


@router.get("/cache/{cache_id}")
async def describe(cache_id: CacheId, request: Request) -> Response:
    worker: Worker = request.app.state.worker
    entry = worker.pool.peek(cache_id)
    return json_reply(
        CacheInfo(
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
    )


@router.delete("/cache/{cache_id}")
async def delete(cache_id: CacheId, request: Request) -> Response:
    worker: Worker = request.app.state.worker
    worker.pool.discard(cache_id)
    return Response(status_code=204)
