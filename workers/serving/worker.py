"""`WorkerRuntime`: the object graph of one worker process, from its settings.

What the C library keeps of memory that was freed: given back to the system.

Tensors of many sizes come and go on several threads, and glibc keeps the gaps between them: a worker's memory would
creep up to many times what it uses, though nothing leaks.
"""

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
    """Owns the engine, the pool and all that serves them. A context manager: leaving it frees everything."""

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
        self.recalls = Recaller(engine, pool, max_waiting=max_at_once)
        self.answerer = GenerationService(engine, pool, self.metrics, self.upgrader.uses, self.shadow, self.recalls)
        self.prefiller = Prefiller(engine, pool, self.prompts, self.metrics, self.recalls, max_jobs=max_at_once)
        self.tickets = TicketIssuer(pool, engine.model.name, (lender.export,) if lender else ())
        self.metrics.watch(
            num_running=lambda: engine.admission.num_running,
            num_waiting=lambda: engine.admission.num_waiting,
            kv_usage=lambda: pool.stats.used_blocks / pool.stats.num_blocks,
        )
        self.metrics.watch_pool(lambda: pool.stats)
        self._chores: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> WorkerRuntime:
        try:
            await self.engine.warm_up()
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        if self.lender is not None:
            self.lender.start()
        self._chores.append(asyncio.create_task(self._sweep()))
        self._chores.append(asyncio.create_task(trim_heap_forever(HEAP_S)))
        self._chores.append(asyncio.create_task(self.shadow.run()))
        if self.settings.upgrade_idle_s is not None:
            self._chores.append(asyncio.create_task(self.upgrader.run()))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for chore in self._chores:
            await cancel_and_wait(chore)
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
        """Raise `ModelNotFound` unless `name` is this worker's model (or no name was given)."""
        if name not in (None, self.engine.model.name):
            raise ModelNotFound(f"unknown model {name!r}; this worker runs {self.engine.model.name!r}", param=param)

    async def _sweep(self) -> None:
        """Free what has expired, and what dead peers still hold of our memory."""
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
    """Load the model and the bundles and take the pool's memory. Takes seconds. Raises `SettingsError`, and
    `KvrelayError` where the pool does not fit. `connect` gives the client of a peer's URL."""
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
        pool = _pool(settings, arena, engine.model.fingerprint)
        on_failure.callback(pool.close)
        lender = _lender(settings, arena, secret)
        on_failure.pop_all()
    return WorkerRuntime(
        settings, engine, pool, bundles, connect or (lambda url: WorkerClient(url, secret)), secret, lender
    )


def _pool(settings: WorkerSettings, arena: Arena, fingerprint: str) -> Pool:
    if not settings.host_tier_bytes:
        return Pool(arena, fingerprint)
    return TieredPool(arena, fingerprint, tier_bytes=settings.host_tier_bytes)


def _lender(settings: WorkerSettings, arena: Arena, secret: str) -> Lender | None:
    tcp = settings.tcp
    if tcp is None:
        return None
    try:
        return Lender(arena, secret, host=tcp.host, port=tcp.port, advertised_host=tcp.address)
    except OSError as error:
        raise SettingsError(
            f"worker {settings.id!r} cannot lend its blocks on {tcp.host}:{tcp.port}: {error.strerror or error}"
        ) from error


async def trim_heap_forever(every_s: float) -> None:
    """Gives back what it can, again and again, for ever."""
    while True:
        await asyncio.sleep(every_s)
        await asyncio.to_thread(trim_heap)


def trim_heap() -> bool:
    """Whether anything was given back; never where the C library cannot. Takes milliseconds, on any thread."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):
        return False
    return bool(trim(0))
