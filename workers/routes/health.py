"""Is the process there, may it be given work, and its metrics. No model is called and no secret asked for."""

from __future__ import annotations

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from workers.routes.replies import json_reply
from workers.serving.worker import Worker

router = APIRouter()


@router.get("/livez")
async def livez() -> Response:
    return json_reply({"status": "alive"})


@router.get("/health")
@router.get("/readyz")
async def readyz(request: Request) -> Response:
    worker: Worker = request.app.state.worker
    if worker.draining:
        return json_reply({"status": "draining"}, 503)
    return json_reply({"status": "ready"})


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    worker: Worker = request.app.state.worker
    return Response(worker.metrics.expose(), media_type=CONTENT_TYPE_LATEST)
