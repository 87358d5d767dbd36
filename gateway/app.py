"""`create_app`: the gateway as an ASGI application.

uvicorn ─► EdgeMiddleware ─┬─► the endpoint of a POST with a body, directly
                           └─► FastAPI: router, all other endpoints
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import httpx
from fastapi import FastAPI

from gateway.discovery import discovery
from gateway.http import admin, caches, chat, models
from gateway.http.edge import BodyRoute, GatewayEdge
from gateway.reload import ConfigSource, reloading
from gateway.settings import Settings
from gateway.snapshot import Gateway
from workers.api.http import health
from workers.api.http.edge import EdgeMiddleware
from workers.api.http.replies import install_error_replies


def create_app(
    settings: Settings,
    secret: str,
    *,
    transports: Mapping[str, httpx.AsyncBaseTransport] | None = None,
    source: ConfigSource | None = None,
) -> FastAPI:
    """Build the gateway from its settings. `transports` replace the network for calls to workers, by worker id;
    `source` is the file that the settings came from: the gateway follows it. `/docs` loads its scripts from a CDN.

    Raises `SettingsError` for an address that others can reach while no tenant has an API key, and for a file of a
    password or key that cannot be used.
    """
    gateway, board_url = Gateway(settings, secret, transports or {}), settings.board_url

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await gateway.start()
        try:
            async with reloading(gateway, source), discovery(gateway, board_url, secret):
                yield
        finally:
            await gateway.stop()

    app = FastAPI(
        title="kvrelay",
        version="1",
        lifespan=lifespan,
        docs_url="/docs" if settings.server.docs else None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.gateway, app.state.source, app.state.edge = gateway, source, GatewayEdge(gateway)
    for router in (chat.router, caches.router, models.router, health.router, admin.router):
        app.router.routes.extend(router.routes)  # as they are: `include_router` builds each again for every app
    with_body = [route for route in (*chat.router.routes, *caches.router.routes) if isinstance(route, BodyRoute)]
    shortcuts = {route.path: route.get_route_handler() for route in with_body}
    app.add_middleware(EdgeMiddleware, edge=app.state.edge, shortcuts=shortcuts)
    install_error_replies(app)
    return app
