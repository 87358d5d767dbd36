"""`/v1/prefix/prefill` and `/v1/cache/transfer`: for clients that manage caches themselves."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, Literal

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from gateway.http.edge import CALLS_WITH_KEY, BodyRoute
from gateway.request.cache_calls import CacheCall
from gateway.schemas import HandoffRequest, PrefixRequest
from gateway.snapshot import Snapshot
from gateway.upstream.deadline import Deadline
from workers.api.http.disconnect import until_disconnect
from workers.api.http.replies import json_reply
from workers.api.schemas import CacheReply, PrefillReply

router = APIRouter(route_class=BodyRoute, tags=["caches"], **CALLS_WITH_KEY)


class PrefilledCache(PrefillReply):
    """`cached_tokens` of the prefix were in a cache already."""

    object: Literal["cache"]
    model: str


class TransferredCache(CacheReply):
    """`reused_tokens` were mapped already, by an earlier transfer of the same conversation."""

    object: Literal["cache"]
    model: str
    mapper: str
    map_ms: float
    copy_ms: float
    total_ms: float
    bytes: int
    reused_tokens: int


@router.post("/v1/prefix/prefill", response_model=PrefilledCache)
async def prefill(body: PrefixRequest, request: Request) -> Response:
    """Prefill a text or a conversation, and return the id of its cache."""
    return await _reply(request, "prefill", _call(request).prefill(body))


@router.post("/v1/cache/transfer", response_model=TransferredCache)
async def transfer(body: HandoffRequest, request: Request) -> Response:
    """Map a cache into another model, and return the id of the new cache."""
    return await _reply(request, "transfer", _call(request).transfer(body))


def _call(request: Request) -> CacheCall:
    snapshot: Snapshot = request.state.snapshot
    deadline = Deadline.after(snapshot.settings.deadlines.request_s)
    return CacheCall(request.state.tenant, snapshot.parts, deadline)


async def _reply(request: Request, phase: str, work: Coroutine[Any, Any, dict[str, Any]]) -> Response:
    """A client that hangs up stops the worker."""
    disconnects = request.app.state.gateway.metrics.client_disconnects
    return json_reply(await until_disconnect(work, request.receive, lambda: disconnects.labels(phase).inc()))
