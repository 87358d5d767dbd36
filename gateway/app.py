"""`create_app`: the gateway, and the application over it: FastAPI, behind the gateway's own layers.

    Trace ─► Bounds ─► Direct ─┬─► the two endpoints that answer, at once
                               └─► FastAPI: its own layers, router, all other endpoints
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import httpx
from fastapi import FastAPI
from starlette.types import Receive, Scope, Send

from gateway.document import document
from gateway.http import admin, caches, chat, health, models
from gateway.http.direct import Direct
from gateway.http.replies import install_error_replies
from gateway.middleware import Bounds, Trace
from gateway.settings import Settings
from gateway.snapshot import Gateway
from gateway.state.discovery import discovering
from gateway.state.reload import Source, following


class Application(FastAPI):
    """The layers lie around all of FastAPI's, and not within: a call that goes past the router needs none of those."""

    def __init__(self, gateway: Gateway, **options: Any):
        super().__init__(**options)
        self.state.gateway = gateway
        self._edge = Trace(Bounds(Direct(super().__call__, posts=chat.DIRECT)), gateway)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self
        await self._edge(scope, receive, send)


def create_app(
    settings: Settings,
    secret: str,
    *,
    transports: Mapping[str, httpx.AsyncBaseTransport] | None = None,
    source: Source | None = None,
) -> FastAPI:
    """The gateway as an ASGI application. `transports` carry the calls to workers by id, in place of the network;
    `source` is where the settings came from, to be followed from now on.

    Raises `SettingsError` for an address that others can reach while no tenant has an API key, and for a file of a
    password or key that cannot be used.
    """
    gateway, board_url = Gateway(settings, secret, transports or {}), settings.board_url

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await gateway.start()
        try:
            async with following(gateway, source), discovering(gateway, board_url, secret):
                yield
        finally:
            await gateway.stop()

    app = Application(
        gateway, title="kvrelay", lifespan=lifespan, docs_url=None, redoc_url=None, redirect_slashes=False
    )
    app.openapi = partial(document, app)  # type: ignore[method-assign]
    app.state.source = source
    for routes in (chat, caches, models, health, admin):
        app.include_router(routes.router)
    install_error_replies(app)
    return app
