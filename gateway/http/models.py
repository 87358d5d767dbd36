"""`/v1/models`: the names that a request may carry as `model`."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.requests import Request

from gateway.http.edge import CALLS_WITH_KEY, authenticate
from gateway.request.route import check_may_use
from gateway.snapshot import Snapshot

router = APIRouter(tags=["models"], **CALLS_WITH_KEY)


class Model(BaseModel):
    """A tier's name, a model's own name, or `auto`."""

    id: str
    object: Literal["model"] = "model"
    created: int = 0
    owned_by: str = "kvrelay"


class ModelList(BaseModel):
    """Every model that the key may use."""

    object: Literal["list"] = "list"
    data: list[Model]


@router.get("/v1/models")
async def list_models(request: Request) -> ModelList:
    snapshot: Snapshot = request.state.snapshot
    tenant = authenticate(request)
    return ModelList(data=[Model(id=name) for name in snapshot.parts.fleet.names_of(tenant.tiers)])


@router.get("/v1/models/{name:path}")
async def get_model(request: Request, name: str) -> Model:
    snapshot: Snapshot = request.state.snapshot
    tenant = authenticate(request)
    tier = snapshot.parts.fleet.find(name, tenant.tiers)
    if tier is not None:
        check_may_use(tenant, tier)
    return Model(id=name)
