"""`create_app`: the worker as an ASGI application."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from workers.api.http.edge import EdgeMiddleware
from workers.api.http.health import READY, health_router
from workers.api.http.replies import install_error_replies
from workers.routes import caches, completions, model
from workers.routes.edge import WorkerEdge
from workers.serving.worker import WorkerRuntime


def create_app(worker: WorkerRuntime, secret: str) -> FastAPI:
    """Serve `worker` to callers that know `secret`. The caller opens and closes the worker."""

    def readiness() -> dict[str, Any]:
        return {"status": "draining" if worker.draining else READY}

    app = FastAPI(title="kvrelay worker", openapi_url=None)
    app.state.worker, app.state.edge = worker, WorkerEdge(worker, secret)
    for router in (health_router(readiness, worker.metrics.expose), model.router, caches.router, completions.router):
        app.include_router(router)
    app.add_middleware(EdgeMiddleware, edge=app.state.edge)
    install_error_replies(app)
    return app
