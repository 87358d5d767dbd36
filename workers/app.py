"""`create_app`: the worker as an ASGI application."""

from __future__ import annotations

from fastapi import FastAPI

from workers.api.http import health
from workers.api.http.edge import EdgeMiddleware
from workers.api.http.replies import install_error_replies
from workers.routes import caches, completions, model
from workers.routes.edge import WorkerEdge
from workers.serving.worker import WorkerRuntime


def create_app(worker: WorkerRuntime, secret: str) -> FastAPI:
    """Serve `worker` to callers that know `secret`. The caller opens and closes the worker."""

    app = FastAPI(title="kvrelay worker", openapi_url=None)
    app.state.worker, app.state.edge = worker, WorkerEdge(worker, secret)
    for router in (health.router, model.router, caches.router, completions.router):
        app.router.routes.extend(router.routes)  # as they are: `include_router` builds each again for every app
    app.add_middleware(EdgeMiddleware, edge=app.state.edge)
    install_error_replies(app)
    return app
