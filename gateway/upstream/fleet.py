"""`Fleet`: all tiers, small to large, and the health checks that notice restarts."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Collection, Mapping
from functools import cached_property

import httpx
import structlog

from gateway.metrics import OTHER, Metrics
from gateway.settings import AUTO, Settings
from gateway.upstream.breaker import Breaker, ChangeSignal
from gateway.upstream.limits import Gate
from gateway.upstream.tier import Tier
from gateway.upstream.worker import Worker
from workers.api.client import WorkerClient
from workers.api.errors import ModelNotFound

DOWN_POLL_S = 0.25  # a worker that is down may be about to start
BOUNDS = ("limits", "breaker", "deadlines")  # settings that gates, circuits and workers depend on

log = structlog.get_logger()


class Fleet:
    """All tiers, small to large. `watch` checks every worker's health until it is cancelled.

    Workers and gates whose configuration did not change are taken over from the fleet `before`, with all that they have
    learnt.
    """

    def __init__(
        self,
        settings: Settings,
        secret: str,
        metrics: Metrics,
        transports: Mapping[str, httpx.AsyncBaseTransport],
        before: Fleet | None = None,
    ):
        self._settings = settings
        self._secret = secret
        self._metrics = metrics
        self._transports = transports
        was = before._settings if before is not None else None
        kept = before if all(getattr(was, name, None) == getattr(settings, name) for name in BOUNDS) else None
        self._changes: ChangeSignal = kept._changes if kept else ChangeSignal()
        self.gates = {tier.name: self._gate(tier.name, kept) for tier in settings.tiers}
        self.tiers = {
            tier.name: Tier(
                tier.name,
                tier.model,
                [self._worker(name, before, kept) for name, of in settings.workers.items() if of.tier == tier.name],
                self.gates[tier.name],
            )
            for tier in settings.tiers
        }

    # Names

    @property
    def names(self) -> list[str]:
        return list(self.tiers)

    @property
    def workers(self) -> list[Worker]:
        return [worker for tier in self.tiers.values() for worker in tier.workers.values()]

    def worker(self, worker_id: str) -> Worker | None:
        return next((worker for worker in self.workers if worker.id == worker_id), None)

    def find(self, model: str, visible: Collection[str], param: str = "model") -> Tier | None:
        """The tier behind a model name that the client sent as `param`; None for `auto`. Raises `ModelNotFound`, which
        lists the `visible` tiers only: those that the client may use."""
        if model == AUTO:
            return None
        for tier in self.tiers.values():
            if model in (tier.name, tier.model):
                return tier
        raise ModelNotFound(f"unknown model {model[:80]!r}; known: {', '.join(self.names_of(visible))}", param=param)

    @cached_property
    def model_names(self) -> list[str]:
        return self.names_of(self.names)

    def names_of(self, tiers: Collection[str]) -> list[str]:
        """The model names that a client of these tiers may send."""
        names = [AUTO, *(name for tier in tiers for name in (tier, self.tiers[tier].model))]
        return list(dict.fromkeys(names))

    def label(self, model: object) -> str:
        """The model name as a metric label: `other` if it is not configured."""
        return model if isinstance(model, str) and model in self.model_names else OTHER

    # Health

    async def watch(self) -> None:
        await asyncio.gather(*(self._watch(worker) for worker in self.workers))

    async def check_health(self, *, only_new: bool = False) -> None:
        """Check every worker once, or those that were never checked."""
        workers = [worker for worker in self.workers if worker.info is None or not only_new]
        await asyncio.gather(*(worker.check_health() for worker in workers))

    async def _watch(self, worker: Worker) -> None:
        poll_s = self._settings.deadlines.worker_poll_s
        while True:
            pause_s = poll_s if worker.is_up else min(poll_s, DOWN_POLL_S)
            await asyncio.sleep(pause_s * (0.8 + 0.4 * random.random()))
            was_up = worker.is_up
            try:
                await worker.check_health()
                if worker.is_up != was_up:
                    log.info("worker_up" if worker.is_up else "worker_down", worker=worker.id)
            except Exception as error:  # a bug must not end the watch
                log.error("watch_failed", worker=worker.id, error=repr(error))

    def export_circuits(self) -> None:
        """Set the `circuit_state` gauge of every worker."""
        for worker in self.workers:
            for circuit in (worker.breaker, worker.transfers):
                self._metrics.circuit_state.labels(circuit.target).set(circuit.state)

    async def aclose(self, keep: Fleet | None = None) -> None:
        """Close every worker's client, except those that the fleet `keep` shares."""
        for worker in self.workers:
            if keep is None or worker not in keep.workers:
                await worker.client.aclose()

    # Construction

    def _gate(self, tier: str, kept: Fleet | None) -> Gate:
        if kept is not None and tier in kept.gates:
            return kept.gates[tier]
        limits = self._settings.limits
        gate = Gate(tier, max_running=limits.max_concurrency_per_tier, max_waiting=limits.max_queue_per_tier)
        self._metrics.show_gate(tier, gate)
        return gate

    def _worker(self, worker_id: str, before: Fleet | None, kept: Fleet | None) -> Worker:
        """The worker from before if nothing changed. At the same address, a new one that knows what was known."""
        settings, known = self._settings.workers[worker_id], None
        if before is not None and worker_id in before._settings.workers:
            was = before._settings.workers[worker_id]
            if (was.tier, was.url) == (settings.tier, settings.url):
                known = before.tiers[was.tier].workers[worker_id]
        if known is not None and kept is not None:
            return known
        worker = Worker(
            worker_id,
            settings.tier,
            WorkerClient(settings.url, self._secret, transport=self._transports.get(worker_id), fast=True),
            gate=self.gates[settings.tier],
            breaker=self._breaker(worker_id),
            transfers=self._breaker(f"{worker_id}/transfer"),
            times=self._settings.deadlines,
            on_restart=self._count_restart,
        )
        if known is not None:
            worker.learn_from(known)
        return worker

    def _breaker(self, target: str) -> Breaker:
        on_transition = self._metrics.circuit_changed
        return Breaker(target, self._settings.breaker, on_transition=on_transition, changes=self._changes)

    def _count_restart(self, worker_id: str) -> None:
        self._metrics.worker_restarts.labels(worker_id).inc()
        log.info("worker_restarted", worker=worker_id)
