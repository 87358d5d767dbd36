"""`/livez`, `/readyz`, `/health` and `/metrics`, by GET or HEAD. None of them calls a model or the registry."""

from __future__ import annotations

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from gateway.http.replies import json_reply

router = APIRouter()


@router.get("/livez")
@router.head("/livez", include_in_schema=False)
async def livez(request: Request) -> Response:
    """The process answers."""
    return json_reply({"status": "alive"})


@router.get("/readyz")
@router.head("/readyz", include_in_schema=False)
@router.get("/health")
@router.head("/health", include_in_schema=False)
async def readyz(request: Request) -> Response:
    """503 while draining, or with no usable tier."""
    gateway = request.app.state.gateway
    tiers = {name: tier.is_ready for name, tier in gateway.parts.fleet.tiers.items()}
    if gateway.is_draining:
        return json_reply({"status": "draining", "tiers": tiers}, 503)
    if not any(tiers.values()):
        return json_reply({"status": "no usable tier", "tiers": tiers}, 503)
    return json_reply({"status": "ready", "tiers": tiers})


@router.get("/metrics")
@router.head("/metrics", include_in_schema=False)
async def metrics(request: Request) -> Response:
    rendered = request.app.state.gateway.metrics.render()
    return Response(rendered, headers={"content-type": CONTENT_TYPE_LATEST})
