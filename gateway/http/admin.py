"""What an operator needs of a running gateway, on a key of its own; without one there are no such routes.

    GET  /admin/state                     generation, workers with their circuits
    GET  /admin/usage                     requests and tokens by tenant, since this process started
    POST /admin/reload                    the configuration, read anew
    POST /admin/workers/{id}/drain        it gets no new calls; those under way end as they would
    POST /admin/workers/{id}/resume       it does again
    POST /admin/workers/{id}/bundles/{id}/resume   it uses a bundle again that was switched off in service
"""

from __future__ import annotations

from typing import Any

import structlog
from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from gateway.errors import NoMapper, NotFound
from gateway.http.replies import json_reply, no_such_route
from gateway.snapshot import Gateway, Snapshot
from gateway.state import reload
from gateway.upstream.fleet import Fleet
from gateway.upstream.worker import Worker
from workers.api.errors import BundleUnusable, InvalidRequest

log = structlog.get_logger()


async def let_in(request: Request) -> None:
    """Raises `AuthenticationFailed`, and `NotFound` where no key is configured."""
    snapshot: Snapshot = request.state.snapshot
    if snapshot.admin_key is None:
        raise no_such_route(request)
    snapshot.admin_key.check(request.headers.get("authorization"))
    log.info("admin", method=request.method, path=request.url.path)


router = APIRouter(prefix="/admin", dependencies=[Depends(let_in)], include_in_schema=False)


@router.get("/state")
async def state(request: Request) -> Response:
    gateway: Gateway = request.app.state.gateway
    workers = {worker.id: _told(worker) for worker in gateway.parts.fleet.workers}
    generation = gateway.current.generation
    return json_reply({"generation": generation, "is_draining": gateway.is_draining, "workers": workers})


@router.get("/usage")
async def usage(request: Request) -> Response:
    return json_reply(request.app.state.gateway.usage.report())


@router.post("/reload")
async def read_anew(request: Request) -> Response:
    """400 tells what is wrong with the configuration; then the one before stays."""
    gateway: Gateway = request.app.state.gateway
    source = request.app.state.source
    if source is None:
        raise InvalidRequest("this gateway was not started from a file")
    problem = await reload.reload(gateway, source)
    if problem is not None:
        raise InvalidRequest(f"the configuration cannot be used: {problem}")
    return json_reply({"generation": gateway.current.generation})


@router.post("/workers/{worker_id}/drain")
async def drain(request: Request, worker_id: str) -> Response:
    return _switched(request, worker_id, is_drained=True)


@router.post("/workers/{worker_id}/resume")
async def resume(request: Request, worker_id: str) -> Response:
    return _switched(request, worker_id, is_drained=False)


@router.post("/workers/{worker_id}/bundles/{bundle_id}/resume")
async def resume_bundle(request: Request, worker_id: str, bundle_id: str) -> Response:
    """409 tells why the worker cannot use it."""
    worker = _named(request, worker_id)
    known = _bundles(worker)
    if bundle_id not in known:
        raise NotFound(f"unknown bundle {bundle_id[:80]!r}; known: {', '.join(known) or 'none'}")
    try:
        await worker.client.resume_bundle(bundle_id)
    except BundleUnusable as error:
        raise NoMapper(f"bundle {bundle_id} cannot be used: {error.message}") from error
    await worker.check_health()
    return json_reply(_told(worker))


def _switched(request: Request, worker_id: str, *, is_drained: bool) -> Response:
    worker = _named(request, worker_id)
    request.app.state.gateway.drain(worker, is_drained)
    return json_reply(_told(worker))


def _named(request: Request, worker_id: str) -> Worker:
    fleet: Fleet = request.app.state.gateway.parts.fleet
    worker = fleet.worker(worker_id)
    if worker is None:
        known = ", ".join(one.id for one in fleet.workers)
        raise NotFound(f"unknown worker {worker_id[:80]!r}; known: {known}")
    return worker


def _bundles(worker: Worker) -> dict[str, dict[str, Any]]:
    """By their ids, as the worker told when it was last looked at."""
    told = worker.info.bundles if worker.info else []
    return {one.bundle_id: {"is_usable": one.usable, "reason": one.reason} for one in told}


def _told(worker: Worker) -> dict[str, Any]:
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
