"""A worker process, from its settings to its orderly end.

    load ──► warm up ──► ready ──► SIGTERM ──► /readyz returns 503, calls are still accepted (grace)
                │                         ──► no new calls, running ones are finished (drain) ──► memory freed
                └─ SIGTERM ───────────────────────────────────────────────────────────────────────────▲

While it is ready, it sends heartbeats if discovery is configured, and takes its peers from theirs.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import structlog
import uvicorn
from redis.exceptions import RedisError

from workers.api import tracing
from workers.api.addresses import ANY_HOST, http_url, listen
from workers.api.config import SettingsError
from workers.api.errors import KvrelayError
from workers.api.heartbeat import Board, Heartbeat, LiveWorkers
from workers.api.http.protocol import Protocol
from workers.api.logs import configure_logs
from workers.api.process import write_ready_file
from workers.api.tasks import repeating
from workers.app import create_app
from workers.serving.worker import WorkerRuntime, build_worker
from workers.settings import WorkerSettings

log = structlog.get_logger()

KEEP_ALIVE_S = 75  # a process frozen for less continues with the calls that arrived meanwhile


def serve(settings: WorkerSettings, secret: str, *, ready_file: Path | None = None) -> int:
    """Run until SIGTERM or SIGINT. Raises `SettingsError` before anything listens."""
    if settings.board_url is not None and settings.url is None and settings.host in ANY_HOST:
        raise SettingsError(
            f"worker {settings.id!r} listens on {settings.host}, which means every address of this machine; with "
            "discovery, set url to the one that others use"
        )
    configure_logs(sys.stderr.buffer)
    try:
        tracing.start(settings.tracing, f"kvrelay-worker-{settings.id}")
    except tracing.TracingUnavailable as error:
        raise SettingsError(str(error)) from error
    try:
        listener = listen(settings.host, settings.port, backlog=2048)
    except OSError as error:
        raise SettingsError(
            f"worker {settings.id!r} cannot listen on {settings.host} port {settings.port}: {error.strerror or error}"
        ) from error
    listener.set_inheritable(False)
    try:
        worker = build_worker(settings, secret)
    except SettingsError:
        raise
    except KvrelayError as error:
        raise SettingsError(f"worker {settings.id!r}: {error.message}") from error
    try:
        return asyncio.run(run(worker, secret, listener, ready_file))
    except SettingsError:
        raise
    except KvrelayError as error:
        raise SettingsError(f"worker {settings.id!r} did not start: {error.message}") from error
    finally:
        if ready_file is not None:
            ready_file.unlink(missing_ok=True)


class _Server(uvicorn.Server):
    """uvicorn with a callback when it accepts calls, and a grace period after a signal in which it still does."""

    def __init__(self, config: uvicorn.Config, worker: WorkerRuntime, on_ready: Callable[[], None]):
        super().__init__(config)
        self._worker = worker
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()

    def stop(self) -> None:
        """Begin to stop. A second call stops without grace or drain."""
        if self._worker.draining:
            self.should_exit = self.force_exit = True
            return
        self._worker.draining = True
        asyncio.get_running_loop().call_later(self._worker.settings.grace_s, setattr, self, "should_exit", True)


async def run(worker: WorkerRuntime, secret: str, listener: socket.socket, ready_file: Path | None) -> int:
    """Warm up and serve a worker that has been built."""
    settings = worker.settings
    bound_url = http_url(settings.host, listener.getsockname()[1])

    def on_ready() -> None:
        if ready_file is not None:
            write_ready_file(ready_file, bound_url)
        print(f"worker {settings.id} ready on {bound_url} with {worker.engine.model.name}", flush=True)  # noqa: T201

    config = uvicorn.Config(
        create_app(worker, secret),
        http=Protocol,
        ws="none",
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=int(settings.drain_s) or 1,
        timeout_keep_alive=KEEP_ALIVE_S,
    )
    server = _Server(config, worker, on_ready)
    with listener:
        async with AsyncExitStack() as stack:
            warming = asyncio.create_task(stack.enter_async_context(worker))
            for signum in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(
                    signum, lambda: server.stop() if warming.done() else warming.cancel()
                )
            await asyncio.wait({warming})
            if warming.cancelled():
                return 0
            warming.result()
            await stack.enter_async_context(announced(worker, secret, settings.url or bound_url))
            stack.callback(listener.close)
            await server._serve([listener])  # `serve` would install uvicorn's own signal handlers
    return 0


@asynccontextmanager
async def announced(worker: WorkerRuntime, secret: str, url: str) -> AsyncIterator[None]:
    """Send heartbeats inside the block that announce the worker at `url`, if discovery is configured."""
    settings, board_url = worker.settings.discovery, worker.settings.board_url
    if settings is None or board_url is None:
        yield
        return
    board = Board(board_url, secret)
    sender = _HeartbeatSender(worker, board, LiveWorkers(settings.lost_after_s), url)
    try:
        async with repeating(sender.beat, settings.beat_s):
            yield
        with suppress(RedisError):
            await board.remove(worker.settings.id)
    finally:
        await board.aclose()


class _HeartbeatSender:
    def __init__(self, worker: WorkerRuntime, board: Board, live: LiveWorkers, url: str):
        self._worker = worker
        self._board = board
        self._live = live
        self._url = url
        self._is_well = True

    async def beat(self) -> None:
        """Send one heartbeat and read the others'. Errors are logged once, until a beat succeeds again."""
        own, epoch = self._worker.settings, self._worker.pool.epoch
        try:
            if not self._worker.draining:
                beat = Heartbeat(worker=own.id, tier=own.tier, url=self._url, epoch=epoch, at=time.time())
                await self._board.put(beat)
            beats = self._live.update(await self._board.read(), time.monotonic())
            urls = {name: beat.url for name, beat in beats.items() if name != own.id}
            await self._worker.transfers.set_discovered(urls)
            self._is_well = True
        except Exception as error:  # any error: the next beat is sent all the same
            if self._is_well:
                log.warning("heartbeat_failed", error=repr(error))
            self._is_well = False
