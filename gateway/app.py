"""`create_app`: the object graph of the gateway, and the FastAPI application over it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import httpx
from fastapi import FastAPI

from gateway import registry
from gateway.cascade import Parts
from gateway.fleet import Fleet
from gateway.limits import Shares
from gateway.metrics import Metrics
from gateway.middleware import Bounds, Trace
from gateway.prefixes import Prefixes
from gateway.routes import chat, health, models
from gateway.routes.replies import install_error_replies
from gateway.settings import Settings
from gateway.tenants import Tenants


@dataclass
class Gateway:
    """What the routes see, as `request.app.state.gateway`. `is_draining` is the one thing that changes."""

    settings: Settings
    parts: Parts
    tenants: Tenants
    is_draining: bool = False


def create_app(
    settings: Settings, secret: str, *, transports: Mapping[str, httpx.AsyncBaseTransport] | None = None
) -> FastAPI:
    """The gateway as an ASGI application. `transports` carry the calls to workers by id, in place of the network.

    Raises `SettingsError` for an address that others can reach while no tenant has an API key.
    """
    settings.check_bind()
    metrics = Metrics()
    fleet = Fleet(settings, secret, metrics, transports or {})
    prefixes = registry.connect(settings.registry, metrics.registry_op)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await fleet.look()
        watch = asyncio.create_task(fleet.watch())
        try:
            yield
        finally:
            watch.cancel()
            with suppress(asyncio.CancelledError):
                await watch
            await prefixes.aclose()
            await fleet.aclose()

    app = FastAPI(title="kvrelay", lifespan=lifespan, openapi_url=None, docs_url=None, redoc_url=None)
    shares = Shares(settings.limits.max_concurrency_per_tenant)
    parts = Parts(settings, fleet, Prefixes(prefixes, metrics), metrics, shares)
    app.state.gateway = Gateway(settings, parts, Tenants(settings, secret))
    app.add_middleware(Bounds, limits=settings.limits)
    app.add_middleware(Trace, metrics=metrics)
    for routes in (chat, models, health):
        app.include_router(routes.router)
    install_error_replies(app)
    return app
