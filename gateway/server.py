"""Run the gateway under uvicorn, with a graceful shutdown.

SIGTERM: `/readyz` returns 503 at once, new requests are accepted for a short grace period, then the sockets close and
requests in flight finish. SIGINT (Ctrl-C) is the same without the grace period; a second one stops at once. SIGHUP
loads the configuration again.
"""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
import time
from pathlib import Path
from types import FrameType

import structlog
import uvicorn
from fastapi import FastAPI

from gateway.reload import ConfigSource
from gateway.settings import Settings
from gateway.snapshot import Gateway
from workers.api.addresses import family_of, http_url
from workers.api.config import SettingsError
from workers.api.http.protocol import Protocol
from workers.api.process import write_ready_file

# An idle connection stays open for longer than clients and load balancers keep theirs (mostly 60 s): closing it first
# could lose a request that is on its way.
KEEP_ALIVE_S = 75

# Allocations between two runs of the garbage collector. A request leaves no cycles behind: Python's default of 700 took
# 6% of the gateway's CPU and freed nothing.
GC_THRESHOLD = 10_000

log = structlog.get_logger()


class Server(uvicorn.Server):
    """uvicorn, with a grace period before it stops. Writes its URL to `ready_file` once it listens."""

    def __init__(self, app: FastAPI, ready_file: Path | None):
        super().__init__(
            uvicorn.Config(
                app,
                loop="uvloop",
                http=Protocol,
                ws="none",
                proxy_headers=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                log_config=None,
                access_log=False,
                server_header=False,
            )
        )
        self._gateway: Gateway = app.state.gateway
        self._source: ConfigSource | None = app.state.source
        self._ready_file = ready_file
        self._exit_at: float | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        gc.freeze()  # what exists now stays alive: no collection needs to traverse it again
        gc.set_threshold(GC_THRESHOLD, *gc.get_threshold()[1:])
        if self._source is not None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._source.requested.set)
        url = http_url(*sockets[0].getsockname()[:2]) if sockets else ""
        log.info("listening", url=url)
        if self._ready_file is not None and self.started:
            write_ready_file(self._ready_file, url)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Replaces uvicorn's handler, which would end the process by the signal: a drained server exits with 0."""
        if self._exit_at is not None and sig == signal.SIGINT:
            self.force_exit = True
        self._gateway.is_draining = True
        deadlines = self._gateway.settings.deadlines
        self.config.timeout_graceful_shutdown = max(1, round(deadlines.drain_s))
        grace_s = deadlines.shutdown_grace_s if sig == signal.SIGTERM else 0.0
        self._exit_at = min(time.monotonic() + grace_s, self._exit_at or float("inf"))

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second."""
        if self._exit_at is not None and time.monotonic() >= self._exit_at:
            self.should_exit = True
        return await super().on_tick(counter)


def bind(settings: Settings) -> socket.socket:
    """A bound socket; port 0 takes a free one. Raises `SettingsError` if the address is not available."""
    host, port = settings.server.host, settings.server.port
    listener = socket.socket(family_of(host), socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise SettingsError(f"server: cannot listen on {host} port {port}: {error}") from error
    return listener
