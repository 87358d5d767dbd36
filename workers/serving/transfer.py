"""`HeadCache`: the first few tokens of prompts, read natively for handoffs, and kept.

A tenant's prompts begin alike, with the chat template's own tokens and the first word of a system prompt, and reading
four tokens takes as long as fetching all weights from memory. What is kept is exact, in tensors apart from any pool.

Taking over caches of other workers: `workers.handoff` with this worker's engine, pool, bundles and peers."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from mappers.cache import KVCache
from workers.api.client import WorkerClient
from workers.api.errors import BundleUnusable, InvalidRequest, KvrelayError
from workers.api.schemas import ESCALATION_PRIORITY, TransferReply, TransferRequest
from workers.bundles import Bundles
from workers.engines.base import Engine
from workers.engines.scheduling import BACKGROUND, Claim
from workers.handoff import HandoffResult, Handoffs, HandoffTarget
from workers.metrics import WorkerMetrics
from workers.pool.pool import Pool
from workers.settings import WorkerSettings
from workers.transports import site_here
from workers.transports.readers import Readers

MAX_KEPT = 64
MAX_KEPT_TOKENS = 16  # of a longer head the next prompt will have another


class HeadCache:
    """For use on one event loop. Heads are looked up by all their tokens and the tenant's salt."""

    def __init__(self, engine: Engine, *, priority: int):
        self._engine = engine
        self._priority = priority
        self._kept: OrderedDict[tuple[str, tuple[int, ...]], KVCache] = OrderedDict()

    async def read(self, token_ids: Sequence[int], salt: str) -> KVCache:
        """The KV of these tokens from position 0 on. Nobody writes to it."""
        key = (salt, tuple(token_ids))
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        head = await self._read(token_ids)
        if len(token_ids) <= MAX_KEPT_TOKENS:
            self._kept[key] = head
            if len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        return head

    async def _read(self, token_ids: Sequence[int]) -> KVCache:
        async with self._engine.sequence(Claim(priority=self._priority), len(token_ids)) as sequence:
            await sequence.prefill(token_ids)
            await sequence.fetch(0)
            kv = sequence.kv(0, len(token_ids))
            return KVCache(tuple(key.clone() for key in kv.keys), tuple(value.clone() for value in kv.values))


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
            prefill_head=HeadCache(engine, priority=ESCALATION_PRIORITY).read,
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
                prefill_head=HeadCache(engine, priority=BACKGROUND).read,
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

    def _count(self, outcome: HandoffResult) -> None:
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
