"""`/livez`, `/readyz`, `/health` and `/metrics`, by GET or HEAD. None of them needs a key, or calls a model."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from workers.api.http.edge import Edge
from workers.api.http.replies import json_reply, operation_id

READY = "ready"


class Health(BaseModel):
    """`tiers` says of each tier whether it is usable; only the gateway has tiers."""

    status: str
    tiers: dict[str, bool] | None = None


NOT_READY: dict[int | str, dict[str, Any]] = {503: {"model": Health, "description": "Not ready"}}

router = APIRouter(tags=["health"], generate_unique_id_function=operation_id)


@router.head("/livez", include_in_schema=False)
@router.get("/livez", response_model=Health)  # registered first, so that a 405 allows it
async def livez() -> Response:
    """200 while the process answers."""
    return json_reply({"status": "alive"})


@router.head("/health", include_in_schema=False)
@router.get("/health", name="health", response_model=Health, responses=NOT_READY)
@router.head("/readyz", include_in_schema=False)
@router.get("/readyz", response_model=Health, responses=NOT_READY)
async def readyz(request: Request) -> Response:
    """200 while new requests are welcome; 503 while draining, or when no model is usable."""
    edge: Edge = request.app.state.edge
    body = edge.readiness()
    return json_reply(body, 200 if body["status"] == READY else 503)


@router.head("/metrics", include_in_schema=False)
@router.get("/metrics", response_class=PlainTextResponse)
async def render_metrics(request: Request) -> Response:
    """Prometheus metrics."""
    edge: Edge = request.app.state.edge
    return Response(edge.render_metrics(), headers={"content-type": CONTENT_TYPE_LATEST})
