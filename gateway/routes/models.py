"""`/v1/models`."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from gateway.routes.replies import json_reply

router = APIRouter()


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    gateway = request.app.state.gateway
    gateway.tenants.authenticate(request.headers.get("authorization"))
    names = gateway.parts.fleet.model_names
    return json_reply({"object": "list", "data": [_model(name) for name in names]})


@router.get("/v1/models/{name:path}")
async def one_model(request: Request, name: str) -> Response:
    gateway = request.app.state.gateway
    gateway.tenants.authenticate(request.headers.get("authorization"))
    gateway.parts.fleet.named(name)
    return json_reply(_model(name))


def _model(name: str) -> dict[str, object]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "kvrelay"}
