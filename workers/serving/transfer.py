"""`Transfers`: `workers.handoff` with this worker's engine, pool, bundles and peers. `HeadCache`: prefilled heads."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from mappers.cache import KVCache
from workers.api.client import WorkerClient
from workers.api.errors import BundleUnusable, InvalidRequest
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

MAX_HEADS = 64
MAX_HEAD_TOKENS = 16  # longer heads are not cached: the next prompt will have another
MAX_REFUSED = 4
TRIAL_S = 60.0  # deadline of a handoff in idle time
TRIAL_TTL_S = 600.0  # longer than the comparison of its cache takes


class HeadCache:
    """Caches the natively prefilled first tokens of prompts, for handoffs.

    A tenant's prompts begin alike, with the chat template's tokens and the first word of a system prompt, and to
    prefill four tokens takes as long as reading all weights from memory. Heads are exact, and looked up by all their
    tokens and the tenant's salt. For use on one event loop.
    """

    def __init__(self, engine: Engine, *, priority: int):
        self._engine = engine
        self._priority = priority
        self._heads: OrderedDict[tuple[str, tuple[int, ...]], KVCache] = OrderedDict()

    async def get(self, token_ids: Sequence[int], salt: str) -> KVCache:
        """Return the KV of these tokens from position 0, in tensors that are never written to again."""
        key = (salt, tuple(token_ids))
        if key in self._heads:
            self._heads.move_to_end(key)
            return self._heads[key]
        async with self._engine.sequence(Claim(priority=self._priority), len(token_ids)) as sequence:
            await sequence.prefill(token_ids)
            await sequence.fetch(0)
            kv = sequence.kv(0, len(token_ids))
            head = KVCache(tuple(key.clone() for key in kv.keys), tuple(value.clone() for value in kv.values))
        if len(token_ids) <= MAX_HEAD_TOKENS:
            self._heads[key] = head
            if len(self._heads) > MAX_HEADS:
                self._heads.popitem(last=False)
        return head


class Transfers:
    """Hands caches of known peers over into this worker's pool."""

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
            prefill_head=HeadCache(engine, priority=ESCALATION_PRIORITY).get,
            run_step=self._steps_of(ESCALATION_PRIORITY),
            readers=self.readers,
            site=self.site,
            observe=self._count,
            transport_failed=lambda kind, error: metrics.transport_failures.labels(kind, error.code).inc(),
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
                prefill_head=HeadCache(engine, priority=BACKGROUND).get,
                run_step=self._steps_of(BACKGROUND),
                observe=lambda result: None,
                release_source=False,
                is_trial=True,
            )
        )
        self._refused: deque[TransferRequest] = deque(maxlen=MAX_REFUSED)  # the latest, while a bundle is on trial

    async def transfer(self, request: TransferRequest) -> TransferReply:
        """Raises what `Handoffs.transfer` raises, and `InvalidRequest` for an unknown source worker."""
        try:
            return await self._handoffs.transfer(request, peer=self._peer(request))
        except BundleUnusable as error:
            if self._bundles.on_trial():
                self._refused.append(request)
            refusals = f"; refused: {self._bundles.refusals}" if self._bundles.refusals else ""
            raise BundleUnusable(f"{error}{refusals}", param=error.param) from error

    def take_refused(self) -> TransferRequest | None:
        """Return a request refused while a bundle was on trial, to try the bundle on; None if there is none."""
        return self._refused.popleft() if self._refused else None

    async def try_out(self, request: TransferRequest) -> TransferReply:
        """Like `transfer`, but by a bundle on trial, in the background. Raises `PoolFull` instead of evicting anything.
        No other request knows the new cache's id; the caller drops the cache."""
        trial = request.model_copy(update={"deadline_ms": TRIAL_S * 1000, "ttl_s": TRIAL_TTL_S, "by_cost": False})
        return await self._trials.transfer(trial, peer=self._peer(trial))

    async def set_discovered(self, discovered: Mapping[str, str]) -> None:
        """Replace the discovered peers, given as URLs by id. Configured peers are kept and take precedence."""
        urls = {**discovered, **self._configured}
        outdated = [name for name, url in self._urls.items() if urls.get(name) != url]
        closing = [self._peers.pop(name) for name in outdated]
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
                f"unknown source_worker {request.source_worker!r}; known peers: {known}", param="source_worker"
            )
        return self._peers[request.source_worker]

    def _steps_of(self, priority: int) -> Callable[[Callable[[], Any]], Awaitable[Any]]:
        return partial(self._engine.compute.run, priority=priority)

    def _count(self, result: HandoffResult) -> None:
        self._metrics.transfers.labels(result.result).inc()
        if result.reply is not None:
            self._metrics.transfer_seconds.observe(result.seconds)
            self._metrics.transfer_tokens.inc(result.num_mapped)
            self._metrics.transfer_bytes.inc(result.reply.bytes)
            self._metrics.transfer_scratch.set(result.reply.scratch_bytes)
            for phase, took_ms in result.reply.phases_ms.items():
                self._metrics.transfer_phase_seconds.labels(phase).observe(took_ms / 1000)
            self._engine.rates.record("map", result.num_mapped, result.mapping_s)
            self._engine.rates.record("handoff", result.num_mapped, result.seconds, length=result.num_mapped)
