"""`WorkerRuntime`: the object graph of one worker process, built from its settings."""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType

import structlog

from workers.api.client import WorkerClient
from workers.api.config import SettingsError
from workers.api.errors import ModelNotFound
from workers.api.schemas import WorkerInfo
from workers.api.tasks import cancel_and_wait
from workers.bundles import Bundles, load_bundles
from workers.engines import load_engine
from workers.engines.base import Engine
from workers.metrics import WorkerMetrics
from workers.pool import create_arena, new_epoch
from workers.pool.arena import Arena
from workers.pool.pool import Pool
from workers.pool.segment import reclaim_dead_segments
from workers.pool.tickets import TicketIssuer
from workers.pool.tiered import TieredPool
from workers.serving.generation import GenerationService
from workers.serving.idle import Upgrader
from workers.serving.prefill import Prefiller, PromptEncoder
from workers.serving.reuse import Recaller
from workers.serving.shadow import Shadow
from workers.serving.transfer import Transfers
from workers.settings import WorkerSettings
from workers.transports.lender import Lender

log = structlog.get_logger()

SWEEP_S = 1.0
HEAP_S = 10.0


class WorkerRuntime:
    """Owns the engine, the pool and everything that serves them. A context manager that frees them at its end."""

    def __init__(
        self,
        settings: WorkerSettings,
        engine: Engine,
        pool: Pool,
        bundles: Bundles,
        connect: Callable[[str], WorkerClient],
        secret: str,
        lender: Lender | None = None,
    ):
        self.settings = settings
        self.engine = engine
        self.pool = pool
        self.bundles = bundles
        self.lender = lender
        self.draining = False
        self.metrics = WorkerMetrics()
        max_at_once = settings.max_running + settings.max_queue
        self.prompts = PromptEncoder(engine, max_waiting=max_at_once)
        self.upgrader = Upgrader(engine, pool, self.metrics, settings.upgrade_idle_s or 0.0)
        self.transfers = Transfers(settings, engine, pool, bundles, self.metrics, connect, secret)
        self.shadow = Shadow(engine, pool, bundles, self.transfers, self.metrics, settings.shadow_idle_s)
        self.recaller = Recaller(engine, pool, max_waiting=max_at_once)
        self.generations = GenerationService(
            engine, pool, self.metrics, self.upgrader.usage_counts, self.shadow, self.recaller
        )
        self.prefiller = Prefiller(engine, pool, self.prompts, self.metrics, self.recaller, max_jobs=max_at_once)
        self.tickets = TicketIssuer(pool, engine.model.name, (lender.export,) if lender else ())
        self.metrics.watch(
            num_running=lambda: engine.admission.num_running,
            num_waiting=lambda: engine.admission.num_waiting,
            kv_usage=lambda: pool.stats.used_blocks / pool.stats.num_blocks,
        )
        self.metrics.watch_pool(lambda: pool.stats)
        self._background: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> WorkerRuntime:
        try:
            await self.engine.warm_up()
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        if self.lender is not None:
            self.lender.start()
        self._background.append(asyncio.create_task(self._sweep()))
        self._background.append(asyncio.create_task(trim_heap_forever(HEAP_S)))
        self._background.append(asyncio.create_task(self.shadow.run()))
        if self.settings.upgrade_idle_s is not None:
            self._background.append(asyncio.create_task(self.upgrader.run()))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._background:
            await cancel_and_wait(task)
        await self.prefiller.aclose()
        await self.transfers.aclose()
        await self.engine.aclose()
        self.prompts.close()
        if self.lender is not None:
            await asyncio.to_thread(self.lender.close)
        await asyncio.to_thread(self.pool.close)

    @property
    def info(self) -> WorkerInfo:
        model, stats = self.engine.model, self.pool.stats
        return WorkerInfo(
            worker=self.settings.id,
            model=model.name,
            fingerprint=model.fingerprint,
            engine=self.engine.name,
            device=model.device,
            layout=model.layout,
            epoch=self.pool.epoch,
            max_model_len=model.max_model_len,
            transports=self.transfers.site.transports,
            bundles=self.bundles.infos,
            pool_blocks=stats.num_blocks,
            free_blocks=stats.free_blocks,
            rates=self.engine.rates.snapshot(),
            pid=os.getpid(),
            exports=self.tickets.exports,
            site=self.transfers.site,
            response_formats=list(self.engine.response_formats),
        )

    def check_model(self, name: str | None, param: str = "model") -> None:
        """Raise `ModelNotFound` unless `name` is None or this worker's model."""
        if name not in (None, self.engine.model.name):
            raise ModelNotFound(f"unknown model {name!r}; this worker runs {self.engine.model.name!r}", param=param)

    async def _sweep(self) -> None:
        """Free expired caches, and readers of dead peers' pools."""
        while True:
            await asyncio.sleep(SWEEP_S)
            try:
                self.pool.sweep()
                await asyncio.to_thread(self.transfers.readers.sweep)
            except Exception:
                log.exception("sweep_failed")


def build_worker(
    settings: WorkerSettings, secret: str, *, connect: Callable[[str], WorkerClient] | None = None
) -> WorkerRuntime:
    """Load the model and the bundles, and allocate the pool. Takes seconds. `connect` returns the client for a peer's
    URL. Raises `SettingsError`, and `KvrelayError` if the pool does not fit."""
    engine = load_engine(settings)
    bundles = load_bundles(
        settings.bundles,
        target_fingerprint=engine.model.fingerprint,
        target_tokenizer=engine.model.tokenizer_digest,
        gate=settings.gate,
        device=settings.device,
        shadow_window=settings.shadow_window,
        rest_s=settings.shadow_rest_s,
    )
    reclaim_dead_segments()
    kind = "shm" if settings.device == "cpu" else "cuda_ipc"
    arena = create_arena(
        kind,
        engine.model.layout,
        settings.pool_bytes,
        worker=settings.id,
        epoch=new_epoch(),
        device=settings.device,
    )
    with ExitStack() as on_failure:
        on_failure.callback(arena.close)
        fingerprint, tier_bytes = engine.model.fingerprint, settings.host_tier_bytes
        pool = TieredPool(arena, fingerprint, tier_bytes=tier_bytes) if tier_bytes else Pool(arena, fingerprint)
        on_failure.callback(pool.close)
        lender = _lender(settings, arena, secret)
        on_failure.pop_all()
    return WorkerRuntime(
        settings, engine, pool, bundles, connect or (lambda url: WorkerClient(url, secret, fast=True)), secret, lender
    )


def _lender(settings: WorkerSettings, arena: Arena, secret: str) -> Lender | None:
    tcp = settings.tcp
    if tcp is None:
        return None
    try:
        return Lender(arena, secret, host=tcp.host, port=tcp.port, advertised_host=tcp.address)
    except OSError as error:
        raise SettingsError(
            f"worker {settings.id!r} cannot listen on {tcp.host}:{tcp.port} to lend blocks: {error.strerror or error}"
        ) from error


async def trim_heap_forever(every_s: float) -> None:
    """Return freed memory from the C library to the system, at this interval.

    Tensors of many sizes come and go on several threads, and glibc keeps the gaps between them. Without this the
    memory of a worker grows to many times what it uses, though nothing leaks.
    """
    while True:
        await asyncio.sleep(every_s)
        await asyncio.to_thread(trim_heap)


def trim_heap() -> bool:
    """Return whether memory was returned; always false without glibc. Takes milliseconds, on any thread."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):
        return False
    return bool(trim(0))
