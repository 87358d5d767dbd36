"""Runs the gateway: binds, tells where it listens, and ends in good order.

SIGTERM: `/readyz` turns 503 at once, new requests are still taken for a short grace, then the sockets close and what is
in flight is drained. SIGINT (Ctrl-C) is the same without the grace; a second one ends at once. SIGHUP: the
configuration is read anew.
"""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
import time
from pathlib import Path
from types import FrameType
from typing import Any

import structlog
import uvicorn
from fastapi import FastAPI

from gateway.errors import SettingsError
from gateway.settings import Settings
from gateway.snapshot import Gateway
from gateway.state.reload import ConfigSource
from workers.api.addresses import family_of, http_url
from workers.api.http.protocol import Protocol
from workers.api.process import write_ready_file

# How long an idle connection stays open: longer than clients and load balancers (60 s, most of them) keep theirs, else
# a request that is on its way just then is broken off without a word.
KEPT_S = 75

# Objects made until the collector looks at them. A request leaves no cycle behind: a look at every 700, Python's own
# choice, took 6% of the gateway's CPU and found nothing.
YOUNG = 10_000

QUIET: dict[str, Any] = {"log_config": None, "access_log": False, "server_header": False}

log = structlog.get_logger()


class Server(uvicorn.Server):
    """uvicorn, with a grace before it stops, and a file that tells where it listens."""

    def __init__(self, app: FastAPI, ready_file: Path | None):
        super().__init__(
            uvicorn.Config(
                app,
                loop="uvloop",
                http=Protocol,
                ws="none",
                proxy_headers=False,
                timeout_keep_alive=KEPT_S,
                **QUIET,
            )
        )
        self._gateway: Gateway = app.state.gateway
        self._source: ConfigSource | None = app.state.source
        self._ready_file = ready_file
        self._exit_at: float | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        gc.freeze()  # all that is there now stays: no collection needs to look at it again
        gc.set_threshold(YOUNG, *gc.get_threshold()[1:])
        if self._source is not None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._source.requested.set)
        url = http_url(*sockets[0].getsockname()[:2]) if sockets else ""
        log.info("listening", url=url)
        if self._ready_file is not None and self.started:
            write_ready_file(self._ready_file, url)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Not handed on to uvicorn, which would end the process by the signal: a drained server exits with 0."""
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
    """A listening socket; port 0 takes a free one. Raises `SettingsError` where the address cannot be had."""
    host, port = settings.server.host, settings.server.port
    listener = socket.socket(family_of(host), socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise SettingsError(f"server: cannot listen on {host} port {port}: {error}") from error
    return listener
