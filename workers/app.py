"""The worker as an ASGI application."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.types import ASGIApp

from workers.routes import bundles, caches, completions, health, prompts
from workers.routes.guard import LimitBody, Record, RequireSecret
from workers.routes.replies import install_error_replies
from workers.serving.worker import Worker


def create_app(worker: Worker, secret: str) -> ASGIApp:
    """Serves `worker` to whoever knows `secret`. The caller opens and closes the worker."""
    app = FastAPI(title="kvrelay worker", openapi_url=None)
    app.state.worker = worker
    install_error_replies(app)
    for part in (health, prompts, caches, bundles, completions):
        app.include_router(part.router)
    limited = LimitBody(app, worker.settings.max_body_bytes, worker.settings.body_timeout_s)
    return Record(RequireSecret(limited, secret), worker.metrics)
