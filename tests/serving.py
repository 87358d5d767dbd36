"""Serves ASGI applications over real sockets, for what cannot be seen in process: streams, hang-ups, timeouts."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp


def free_socket() -> socket.socket:
    """A listening socket on a free port of the loopback."""
    return socket.create_server(("127.0.0.1", 0))


def url_of(listener: socket.socket) -> str:
    return f"http://127.0.0.1:{listener.getsockname()[1]}"


def has_ipv6() -> bool:
    """Whether this machine's loopback speaks it."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@contextmanager
def serving(
    apps: Mapping[socket.socket, ASGIApp], protocols: Mapping[socket.socket, type[asyncio.Protocol]] | None = None
) -> Iterator[None]:
    """Serves each application on its socket, by uvicorn's protocol or its own, all on one event loop in a thread."""
    chosen = protocols or {}
    servers = {
        listener: uvicorn.Server(
            uvicorn.Config(
                app,
                http=chosen.get(listener, "auto"),
                log_config=None,
                ws="none",
                timeout_graceful_shutdown=1,
            )
        )
        for listener, app in apps.items()
    }

    async def serve() -> None:
        await asyncio.gather(*(server.serve(sockets=[listener]) for listener, server in servers.items()))

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    try:
        _wait_for(servers.values(), thread)
        yield
    finally:
        for server in servers.values():
            server.should_exit = True
        thread.join(timeout=10)
        assert not thread.is_alive(), "a server did not stop"


def _wait_for(servers: object, thread: threading.Thread, within_s: float = 10.0) -> None:
    until = time.monotonic() + within_s
    while not all(server.started for server in servers):  # type: ignore[attr-defined]
        assert thread.is_alive() and time.monotonic() < until, "a server did not start"
        time.sleep(0.005)
