"""Taking over caches of other workers: `workers.handoff` with this worker's engine, pool, bundles and peers."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from workers.api.client import WorkerClient
from workers.api.errors import BundleUnusable, InvalidRequest, KvrelayError
from workers.api.schemas import ESCALATION_PRIORITY, TransferReply, TransferRequest
from workers.bundles import Bundles
from workers.engines.base import Engine
from workers.engines.compute import BACKGROUND
from workers.handoff import Handoffs, HandoffTarget, Outcome
from workers.metrics import WorkerMetrics
from workers.pool.pool import Pool
from workers.serving.heads import Heads
from workers.settings import WorkerSettings
from workers.transports.readers import Readers
from workers.transports.site import site_here

MAX_REFUSED = 4
TRIAL_S = 60.0  # a handoff in idle time may take
TRIAL_TTL_S = 600.0  # longer than what it made is compared


class Transfers:
    """Brings caches of configured peers into this worker's pool."""

    def __init__(
        self,
        settings: WorkerSettings,
        engine: Engine,
        pool: Pool,
        bundles: Bundles,
        metrics: WorkerMetrics,
        connect: Callable[[str], WorkerClient],
        secret: str,
    ):
        self.site = site_here(cuda=settings.device != "cpu")
        self.readers = Readers(secret)
        self._engine = engine
        self._metrics = metrics
        self._bundles = bundles
        self._connect = connect
        self._configured = dict(settings.peers)
        self._urls = dict(settings.peers)
        self._peers = {worker_id: connect(url) for worker_id, url in settings.peers.items()}
        target = HandoffTarget(
            pool=pool,
            model=engine.model.name,
            mappers=bundles.usable,
            prefill_head=Heads(engine, priority=ESCALATION_PRIORITY).read,
            run_step=partial(self._run_step, ESCALATION_PRIORITY),
            readers=self.readers,
            site=self.site,
            observe=self._count,
            transport_failed=self._count_failure,
            release_source=settings.release_source,
            source_released=metrics.sources_released.inc,
            costs=lambda: engine.rates.costs,
            native_share=settings.native_share,
            max_tokens=engine.model.max_model_len,
        )
        self._handoffs = Handoffs(target)
        self._trials = Handoffs(
            replace(
                target,
                mappers=bundles.on_trial,
                prefill_head=Heads(engine, priority=BACKGROUND).read,
                run_step=partial(self._run_step, BACKGROUND),
                observe=lambda outcome: None,
                release_source=False,
                is_trial=True,
            )
        )
        self._refused: deque[TransferRequest] = deque(maxlen=MAX_REFUSED)  # while a bundle is on trial; the latest

    async def transfer(self, request: TransferRequest) -> TransferReply:
        """Errors as `Handoffs.transfer`, and `InvalidRequest` for a source that is no peer."""
        try:
            return await self._handoffs.transfer(request, peer=self._peer(request))
        except BundleUnusable as error:
            if self._bundles.on_trial():
                self._refused.append(request)
            refusals = f"; refused: {self._bundles.refusals}" if self._bundles.refusals else ""
            raise BundleUnusable(f"{error}{refusals}", param=error.param) from error

    def take_refused(self) -> TransferRequest | None:
        """One that was refused while a bundle was on trial, to try that out on; None if there is none, any more."""
        return self._refused.popleft() if self._refused else None

    async def try_out(self, request: TransferRequest) -> TransferReply:
        """As `transfer`, by a bundle on trial, while others' work goes first; raises `PoolFull` rather than evict
        anything. Nobody else knows the cache's id: whoever tried it out drops it."""
        asked = request.model_copy(update={"deadline_ms": TRIAL_S * 1000, "ttl_s": TRIAL_TTL_S, "by_cost": False})
        return await self._trials.transfer(asked, peer=self._peer(asked))

    async def meet(self, found: Mapping[str, str]) -> None:
        """These peers, by id and URL, beside those that are configured; ones that were met before and are not among
        them are forgotten."""
        urls = {**found, **self._configured}
        parted = [name for name, url in self._urls.items() if urls.get(name) != url]
        closing = [self._peers.pop(name) for name in parted]
        self._peers |= {name: self._connect(url) for name, url in urls.items() if name not in self._peers}
        self._urls = urls
        await asyncio.gather(*(peer.aclose() for peer in closing))

    async def aclose(self) -> None:
        await self._handoffs.aclose()
        await self._trials.aclose()
        await asyncio.gather(*(peer.aclose() for peer in self._peers.values()))
        await asyncio.to_thread(self.readers.close)

    def _peer(self, request: TransferRequest) -> WorkerClient:
        if request.source_worker not in self._peers:
            known = ", ".join(sorted(self._peers)) or "none"
            raise InvalidRequest(
                f"unknown source_worker {request.source_worker!r}; configured peers: {known}", param="source_worker"
            )
        return self._peers[request.source_worker]

    async def _run_step(self, priority: int, step: Callable[[], Any]) -> Any:
        return await self._engine.compute.run(step, priority=priority)

    def _count_failure(self, kind: str, error: KvrelayError) -> None:
        self._metrics.transport_failures.labels(kind, error.code).inc()

    def _count(self, outcome: Outcome) -> None:
        self._metrics.transfers.labels(outcome.result).inc()
        if outcome.reply is not None:
            self._metrics.transfer_seconds.observe(outcome.seconds)
            self._metrics.transfer_tokens.inc(outcome.num_mapped)
            self._metrics.transfer_bytes.inc(outcome.reply.bytes)
            self._metrics.transfer_scratch.set(outcome.reply.scratch_bytes)
            for phase, took_ms in outcome.reply.phases_ms.items():
                self._metrics.transfer_phase_seconds.labels(phase).observe(took_ms / 1000)
            self._engine.rates.record("map", outcome.num_mapped, outcome.mapping_s)
            self._engine.rates.record("handoff", outcome.num_mapped, outcome.seconds, length=outcome.num_mapped)
