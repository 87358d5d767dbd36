"""Bundles that were switched off in service, on again because somebody says so."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from workers.routes.replies import json_reply
from workers.serving.worker import Worker

router = APIRouter(prefix="/v1")


@router.post("/bundles/{bundle_id}/resume")
async def resume(bundle_id: str, request: Request) -> Response:
    worker: Worker = request.app.state.worker
    return json_reply(worker.shadow.resume(bundle_id))
