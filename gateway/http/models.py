"""`/v1/models`."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from gateway.http.replies import json_reply
from gateway.request.route import check_may_use
from gateway.snapshot import Snapshot

router = APIRouter()


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    snapshot: Snapshot = request.state.snapshot
    tenant = snapshot.tenants.authenticate(request.headers.get("authorization"))
    names = snapshot.parts.fleet.names_of(tenant.tiers)
    return json_reply({"object": "list", "data": [_model(name) for name in names]})


@router.get("/v1/models/{name:path}")
async def one_model(request: Request, name: str) -> Response:
    snapshot: Snapshot = request.state.snapshot
    tenant = snapshot.tenants.authenticate(request.headers.get("authorization"))
    tier = snapshot.parts.fleet.find(name, tenant.tiers)
    if tier is not None:
        check_may_use(tenant, tier)
    return json_reply(_model(name))


def _model(name: str) -> dict[str, object]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "kvrelay"}
