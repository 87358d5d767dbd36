"""One worker as a process: from its settings to its orderly end.

    load ──► warm up ──► ready ──► SIGTERM ──► /readyz says 503, calls are still taken (grace)
                │                         ──► no new calls, those in flight are finished (drain) ──► memory given back
                └─ SIGTERM ─────────────────────────────────────────────────────────────────────────────────▲

This worker's heartbeats, and the peers whose heartbeats it sees."""

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

KEEP_ALIVE_S = 75  # a process that was frozen for less goes on with the calls that came meanwhile


def serve(settings: WorkerSettings, secret: str, *, ready_file: Path | None = None) -> int:
    """Run until SIGTERM or SIGINT. Raises `SettingsError` before anything listens."""
    _check_can_be_found(settings)
    configure_logs(sys.stderr.buffer)
    try:
        tracing.start(settings.tracing, f"kvrelay-worker-{settings.id}")
    except tracing.TracingUnavailable as error:
        raise SettingsError(str(error)) from error
    listener = _listen(settings)
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


def _check_can_be_found(settings: WorkerSettings) -> None:
    """A heartbeat must get into its Redis, and name an address that leads here from other hosts."""
    if settings.board_url is not None and settings.url is None and settings.host in ANY_HOST:
        raise SettingsError(
            f"worker {settings.id!r} listens on {settings.host}, every address of this machine; with discovery, url "
            "must say which one others use"
        )


class _Server(uvicorn.Server):
    """uvicorn, but it tells when it takes calls, and a signal begins with a grace in which it still does."""

    def __init__(self, config: uvicorn.Config, worker: WorkerRuntime, on_ready: Callable[[], None]):
        super().__init__(config)
        self._worker = worker
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()

    def stop(self) -> None:
        """Begin to end; a second call ends without grace or drain."""
        if self._worker.draining:
            self.should_exit = self.force_exit = True
            return
        self._worker.draining = True
        asyncio.get_running_loop().call_later(self._worker.settings.grace_s, setattr, self, "should_exit", True)


async def run(worker: WorkerRuntime, secret: str, listener: socket.socket, ready_file: Path | None) -> int:
    """What `serve` does once the worker is built."""
    config = uvicorn.Config(
        create_app(worker, secret),
        http=Protocol,
        ws="none",
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=int(worker.settings.drain_s) or 1,
        timeout_keep_alive=KEEP_ALIVE_S,
    )
    server = _Server(config, worker, lambda: _tell_ready(worker, listener, ready_file))
    with listener:
        async with AsyncExitStack() as running:
            warming = asyncio.create_task(running.enter_async_context(worker))
            _on_signal(lambda: server.stop() if warming.done() else warming.cancel())
            await asyncio.wait({warming})
            if warming.cancelled():
                return 0
            warming.result()
            url = worker.settings.url or _url(worker.settings, listener)
            await running.enter_async_context(announced(worker, secret, url))
            running.callback(listener.close)
            await server._serve([listener])  # `serve` would install uvicorn's own signal handlers
    return 0


def _on_signal(do: Callable[[], object]) -> None:
    for wanted in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(wanted, do)


def _tell_ready(worker: WorkerRuntime, listener: socket.socket, ready_file: Path | None) -> None:
    url = _url(worker.settings, listener)
    if ready_file is not None:
        write_ready_file(ready_file, url)
    print(f"worker {worker.settings.id} ready on {url} with {worker.engine.model.name}", flush=True)  # noqa: T201


def _listen(settings: WorkerSettings) -> socket.socket:
    try:
        listener = listen(settings.host, settings.port, backlog=2048)
    except OSError as error:
        raise SettingsError(
            f"worker {settings.id!r} cannot listen on {settings.host} port {settings.port}: {error.strerror or error}"
        ) from error
    listener.set_inheritable(False)
    return listener


def _url(settings: WorkerSettings, listener: socket.socket) -> str:
    return http_url(settings.host, listener.getsockname()[1])


log = structlog.get_logger()


@asynccontextmanager
async def announced(worker: WorkerRuntime, secret: str, url: str) -> AsyncIterator[None]:
    """Within the block others find the worker at `url`, if it is configured so."""
    settings, board_url = worker.settings.discovery, worker.settings.board_url
    if settings is None or board_url is None:
        yield
        return
    board = Board(board_url, secret)
    announcer = _HeartbeatSender(worker, board, LiveWorkers(settings.lost_after_s), url)
    try:
        async with repeating(announcer.beat, settings.beat_s):
            yield
        with suppress(RedisError):
            await board.remove(worker.settings.id)
    finally:
        await board.aclose()


class _HeartbeatSender:
    def __init__(self, worker: WorkerRuntime, board: Board, living: LiveWorkers, url: str):
        self._worker = worker
        self._board = board
        self._living = living
        self._url = url
        self._is_well = True

    async def beat(self) -> None:
        """One beat, and a look at those of others. What fails is logged once, until all is well again."""
        try:
            await self._tell()
            await self._look()
            self._is_well = True
        except Exception as error:  # whatever it is, the next beat comes
            if self._is_well:
                log.warning("heartbeat_failed", error=repr(error))
            self._is_well = False

    async def _tell(self) -> None:
        own, epoch = self._worker.settings, self._worker.pool.epoch
        if not self._worker.draining:
            await self._board.put(Heartbeat(worker=own.id, tier=own.tier, url=self._url, epoch=epoch, at=time.time()))

    async def _look(self) -> None:
        beats = self._living.update(await self._board.read(), time.monotonic())
        urls = {name: beat.url for name, beat in beats.items() if name != self._worker.settings.id}
        await self._worker.transfers.meet(urls)
