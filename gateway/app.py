"""`create_app`: the gateway, and the FastAPI application over it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial

import httpx
from fastapi import FastAPI

from gateway.discovery import discovering
from gateway.document import document
from gateway.middleware import Bounds, Trace
from gateway.reload import Source, following
from gateway.routes import admin, caches, chat, health, models
from gateway.routes.direct import Direct
from gateway.routes.replies import install_error_replies
from gateway.settings import Settings
from gateway.snapshot import Gateway


def create_app(
    settings: Settings,
    secret: str,
    *,
    transports: Mapping[str, httpx.AsyncBaseTransport] | None = None,
    source: Source | None = None,
) -> FastAPI:
    """The gateway as an ASGI application. `transports` carry the calls to workers by id, in place of the network;
    `source` is where the settings came from, to be followed from now on.

    Raises `SettingsError` for an address that others can reach while no tenant has an API key.
    """
    gateway = Gateway(settings, secret, transports or {})

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await gateway.start()
        try:
            async with following(gateway, source), discovering(gateway, secret):
                yield
        finally:
            await gateway.stop()

    app = FastAPI(title="kvrelay", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.openapi = partial(document, app)  # type: ignore[method-assign]
    app.state.gateway = gateway
    app.state.source = source
    app.add_middleware(Direct, posts=chat.DIRECT)
    app.add_middleware(Bounds)
    app.add_middleware(Trace, gateway=gateway)
    for routes in (chat, caches, models, health, admin):
        app.include_router(routes.router)
    install_error_replies(app)
    return app
