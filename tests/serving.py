"""Serves an ASGI application over real sockets, for what cannot be seen in process: streams, hang-ups, timeouts."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp


@contextmanager
def serving(app: ASGIApp, *, lifespan: str = "off") -> Iterator[str]:
    """The application's URL while it runs in a thread of its own, on a free port of the loopback."""
    config = uvicorn.Config(app, log_config=None, lifespan=lifespan, ws="none", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        _wait_until(lambda: server.started or not thread.is_alive())
        assert server.started, "the server did not start"
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(timeout=10)
            assert not thread.is_alive(), "the server did not stop"


def _wait_until(done: object, within_s: float = 10.0) -> None:
    until = time.monotonic() + within_s
    while not done():  # type: ignore[operator]
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.005)
