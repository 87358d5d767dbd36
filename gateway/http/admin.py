"""What an operator needs of a running gateway, behind an admin key; without a configured key these routes are a 404.

GET  /admin/state                     generation, workers with their circuits
GET  /admin/usage                     requests and tokens by tenant, since this process started
POST /admin/reload                    load the configuration again
POST /admin/workers/{id}/drain        send the worker no new calls; those in flight finish
POST /admin/workers/{id}/resume       send it calls again
POST /admin/workers/{id}/bundles/{id}/resume   use a bundle again that was switched off in service
"""

from __future__ import annotations

from typing import Any

import structlog
from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from gateway import reload
from gateway.errors import NoMapper
from gateway.snapshot import Gateway, Snapshot
from gateway.upstream.fleet import Fleet
from gateway.upstream.worker import Worker
from workers.api.errors import BundleUnusable, InvalidRequest
from workers.api.http.errors import NotFound
from workers.api.http.replies import json_reply, route_not_found

log = structlog.get_logger()


async def require_admin_key(request: Request) -> None:
    """Raises `AuthenticationFailed`, and `NotFound` where no key is configured."""
    snapshot: Snapshot = request.state.snapshot
    if snapshot.admin_key is None:
        raise route_not_found(request)
    snapshot.admin_key.check(request.headers.get("authorization"))
    log.info("admin", method=request.method, path=request.url.path)


router = APIRouter(prefix="/admin", dependencies=[Depends(require_admin_key)], include_in_schema=False)


@router.get("/state")
async def state(request: Request) -> Response:
    gateway: Gateway = request.app.state.gateway
    workers = {worker.id: _summary(worker) for worker in gateway.parts.fleet.workers}
    generation = gateway.current.generation
    return json_reply({"generation": generation, "is_draining": gateway.is_draining, "workers": workers})


@router.get("/usage")
async def usage(request: Request) -> Response:
    return json_reply(request.app.state.gateway.usage.report())


@router.post("/reload")
async def load_again(request: Request) -> Response:
    """A configuration that is invalid is a 400 that says why; the current one then stays in use."""
    gateway: Gateway = request.app.state.gateway
    source = request.app.state.source
    if source is None:
        raise InvalidRequest("this gateway was not started from a file")
    problem = await reload.reload(gateway, source)
    if problem is not None:
        raise InvalidRequest(f"the configuration is invalid: {problem}")
    return json_reply({"generation": gateway.current.generation})


@router.post("/workers/{worker_id}/drain")
async def drain(request: Request, worker_id: str) -> Response:
    return _set_drained(request, worker_id, is_drained=True)


@router.post("/workers/{worker_id}/resume")
async def resume(request: Request, worker_id: str) -> Response:
    return _set_drained(request, worker_id, is_drained=False)


@router.post("/workers/{worker_id}/bundles/{bundle_id}/resume")
async def resume_bundle(request: Request, worker_id: str, bundle_id: str) -> Response:
    """A bundle that the worker cannot use is a 409 that says why."""
    worker = _worker(request, worker_id)
    known = _bundles(worker)
    if bundle_id not in known:
        raise NotFound(f"unknown bundle {bundle_id[:80]!r}; known: {', '.join(known) or 'none'}")
    try:
        await worker.client.resume_bundle(bundle_id)
    except BundleUnusable as error:
        raise NoMapper(f"bundle {bundle_id} is not usable: {error.message}") from error
    await worker.check_health()
    return json_reply(_summary(worker))


def _set_drained(request: Request, worker_id: str, *, is_drained: bool) -> Response:
    worker = _worker(request, worker_id)
    request.app.state.gateway.drain(worker, is_drained)
    return json_reply(_summary(worker))


def _worker(request: Request, worker_id: str) -> Worker:
    fleet: Fleet = request.app.state.gateway.parts.fleet
    worker = fleet.worker(worker_id)
    if worker is None:
        known = ", ".join(one.id for one in fleet.workers)
        raise NotFound(f"unknown worker {worker_id[:80]!r}; known: {known}")
    return worker


def _bundles(worker: Worker) -> dict[str, dict[str, Any]]:
    """By id, as of the last health check."""
    bundles = worker.info.bundles if worker.info else []
    return {one.bundle_id: {"is_usable": one.usable, "reason": one.reason} for one in bundles}


def _summary(worker: Worker) -> dict[str, Any]:
    circuits = {"answers": worker.breaker, "transfers": worker.transfers}
    return {
        "tier": worker.tier,
        "is_up": worker.is_up,
        "is_drained": worker.is_drained,
        "is_usable": worker.is_usable,
        "num_in_flight": worker.num_in_flight,
        "epoch": worker.epoch,
        "bundles": _bundles(worker),
        "circuits": {name: circuit.state.name.lower() for name, circuit in circuits.items()},
    }
