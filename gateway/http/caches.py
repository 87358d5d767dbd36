"""`/v1/prefix/prefill` and `/v1/cache/transfer`: for clients that manage caches themselves."""

from __future__ import annotations

from collections.abc import Coroutine
from contextlib import closing
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from gateway.connection import HangUp
from gateway.errors import ClientDisconnected
from gateway.http.incoming import take_in
from gateway.http.replies import json_reply
from gateway.request.cache_calls import CacheCall
from gateway.schemas import HandoffRequest, PrefixRequest
from gateway.snapshot import Snapshot
from gateway.state.tenants import Tenant
from gateway.upstream.deadline import Deadline

router = APIRouter()


@router.post("/v1/prefix/prefill")
async def prefill(request: Request) -> Response:
    taken = await take_in(request, PrefixRequest)
    return await _replied(request, "prefill", _call(request, taken.tenant).prefill(taken.asked))


@router.post("/v1/cache/transfer")
async def transfer(request: Request) -> Response:
    taken = await take_in(request, HandoffRequest)
    return await _replied(request, "transfer", _call(request, taken.tenant).transfer(taken.asked))


def _call(request: Request, tenant: Tenant) -> CacheCall:
    snapshot: Snapshot = request.state.snapshot
    deadline = Deadline.after(snapshot.settings.deadlines.request_s)
    return CacheCall(tenant, snapshot.parts, deadline)


async def _replied(request: Request, phase: str, work: Coroutine[Any, Any, dict[str, Any]]) -> Response:
    """A client that hangs up stops the worker."""
    with closing(HangUp(request.receive)) as hang_up:
        try:
            return json_reply(await hang_up.race(work))
        except ClientDisconnected:
            request.app.state.gateway.metrics.client_disconnects.labels(phase).inc()
            raise
