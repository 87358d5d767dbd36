"""The workers by tier, who among them is asked next, and the watch that notices restarts."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import TypeVar

import httpx
import structlog

from gateway.bell import Bell
from gateway.errors import CircuitOpen, NoUsableWorker
from gateway.metrics import OTHER, Metrics
from gateway.settings import AUTO, Settings, TierSettings
from gateway.upstream.breaker import Breaker, State, until_one_admits
from gateway.upstream.deadline import Deadline
from gateway.upstream.limits import Gate
from gateway.upstream.worker import Worker
from workers.api.client import WorkerClient
from workers.api.errors import KvrelayError, ModelNotFound
from workers.api.schemas import WorkerInfo

DOWN_POLL_S = 0.25
AFFINITY_SLACK = 4  # calls under way: for a prefix that it has read, a worker may be so much busier than another
BOUNDS = ("limits", "breaker", "deadlines")  # settings that gates, circuits and workers are made of
DOWN_RETRY_S = 2.0  # is told to whom nobody can serve for another reason than a circuit

log = structlog.get_logger()

T = TypeVar("T")


class Tier:
    """Equal workers behind one public model name, and the gate to them."""

    def __init__(self, name: str, model: str, workers: Sequence[Worker], gate: Gate):
        self.name = name
        self.model = model
        self.workers = {worker.id: worker for worker in workers}
        self._gate = gate

    @property
    def is_usable(self) -> bool:
        """Some worker was seen to be well, and its circuit lets calls through."""
        return any(worker.is_usable and worker.info is not None for worker in self.workers.values())

    @property
    def response_formats(self) -> list[str]:
        """The types that all of its workers have, of those that were seen."""
        told = dict.fromkeys(one for info in self._infos for one in info.response_formats)
        return [one for one in told if self.may_answer_in(one)]

    def may_answer_in(self, form: str) -> bool:
        """Whether no worker that was seen lacks this type: where none was yet, asking will tell."""
        return all(form in info.response_formats for info in self._infos)

    @property
    def _infos(self) -> list[WorkerInfo]:
        return [worker.info for worker in self.workers.values() if worker.info is not None]

    @property
    def is_ready(self) -> bool:
        return any(worker.is_ready for worker in self.workers.values())

    def pick(self, preferred: str | None = None, avoid: Collection[str] = ()) -> Worker:
        """The preferred worker where it is usable and not much busier than another, else the least busy one; of several
        such the one that was asked least. Raises `NoUsableWorker`."""
        return self._picked([worker for worker in self._in_service(avoid) if worker.is_usable], preferred)

    def pick_to_take_over(self, preferred: str | None = None) -> Worker:
        """As `pick`, of those that a cache may be handed to now; of all where there is none of them."""
        return self._picked(self._taking_over or self._answering, preferred)

    async def ask(
        self,
        call: Callable[[Worker], Awaitable[T]],
        *,
        preferred: str | None = None,
        failed: dict[str, KvrelayError] | None = None,
        patience: Deadline | None = None,
    ) -> tuple[Worker, T]:
        """Whom `pick` gave, and what `call` brought of it. Where nobody is usable now, it waits in the tier's queue,
        within the `patience`, for the first that is. Who `failed` before is not asked, who does now is noted there."""
        failed = {} if failed is None else failed

        async def noted(worker: Worker) -> T:
            try:
                return await call(worker)
            except CircuitOpen:
                raise
            except KvrelayError as error:
                failed[worker.id] = error
                raise

        return await self._asked(
            noted,
            pick=lambda: self.pick(preferred, failed),
            circuits=lambda: [worker.breaker for worker in self._in_service(failed)],
            patience=patience,
        )

    async def ask_to_take_over(
        self, call: Callable[[Worker], Awaitable[T]], patience: Deadline | None
    ) -> tuple[Worker, T]:
        """As `ask`, for a `call` that the circuit of transfers has to let through. It goes to nobody whose answers
        fail, as what it makes is there to answer from."""
        return await self._asked(
            call,
            pick=lambda: self._picked(self._taking_over),
            circuits=lambda: self._in_the_way,
            patience=patience,
        )

    async def _asked(
        self,
        call: Callable[[Worker], Awaitable[T]],
        *,
        pick: Callable[[], Worker],
        circuits: Callable[[], Sequence[Breaker]],
        patience: Deadline | None,
    ) -> tuple[Worker, T]:
        """Whom `pick` gives, once one of the circuits would let it through."""
        while True:
            await self._until_one_admits(circuits, patience)
            worker = pick()
            with suppress(CircuitOpen):  # another call was faster: whoever is usable then
                return worker, await call(worker)

    @property
    def _in_the_way(self) -> list[Breaker]:
        """Of a handoff to each worker whose answers do not fail: its circuit that has yet to let one through."""
        workers = [worker for worker in self._in_service() if worker.breaker.state is not State.OPEN]
        return [worker.transfers if worker.breaker.admits else worker.breaker for worker in workers]

    @property
    def _answering(self) -> list[Worker]:
        return [worker for worker in self.workers.values() if worker.is_usable]

    @property
    def _taking_over(self) -> list[Worker]:
        return [worker for worker in self._answering if worker.transfers.admits]

    def _in_service(self, avoid: Collection[str] = ()) -> list[Worker]:
        return [worker for worker in self.workers.values() if worker.is_in_service and worker.id not in avoid]

    async def _until_one_admits(self, circuits: Callable[[], Sequence[Breaker]], patience: Deadline | None) -> None:
        if patience is not None and not any(circuit.admits for circuit in circuits()):
            with self._gate.queued():
                await until_one_admits(circuits, patience)

    def _picked(self, usable: Sequence[Worker], preferred: str | None = None) -> Worker:
        if not usable:
            waits_s = [worker.breaker.retry_after_s for worker in self.workers.values() if worker.is_in_service]
            raise NoUsableWorker(
                f"no worker of tier {self.name} is usable now", retry_after_s=min(waits_s, default=DOWN_RETRY_S)
            )
        least = min(usable, key=lambda worker: (worker.num_in_flight, worker.num_begun))
        favourite = next((worker for worker in usable if worker.id == preferred), least)
        return favourite if favourite.num_in_flight <= least.num_in_flight + AFFINITY_SLACK else least


class Fleet:
    """All tiers, small to large. `watch` keeps an eye on every worker until it is cancelled.

    What is configured as it was in the fleet `before` is taken over from it, with all that it has learnt.
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
        self._before = before  # while this one is built
        self._keeps = before is not None and all(
            getattr(before._settings, name) == getattr(settings, name) for name in BOUNDS
        )
        self._bell: Bell = before._bell if before is not None and self._keeps else Bell()
        self.gates = {tier.name: self._gate(tier.name) for tier in settings.tiers}
        self.tiers = {tier.name: self._tier(tier) for tier in settings.tiers}
        self._before = None  # else every fleet there ever was would live on

    @property
    def names(self) -> list[str]:
        return list(self.tiers)

    @property
    def workers(self) -> list[Worker]:
        return [worker for tier in self.tiers.values() for worker in tier.workers.values()]

    def worker(self, worker_id: str) -> Worker | None:
        return next((worker for worker in self.workers if worker.id == worker_id), None)

    def named(self, model: str, told: Collection[str], param: str = "model") -> Tier | None:
        """The tier behind a model name, which the client gave as `param`; None for `auto`. Raises `ModelNotFound`,
        naming what there is of the `told` tiers, which are those that the client may use."""
        if model == AUTO:
            return None
        for tier in self.tiers.values():
            if model in (tier.name, tier.model):
                return tier
        raise ModelNotFound(f"unknown model {model[:80]!r}; known: {', '.join(self.names_of(told))}", param=param)

    @cached_property
    def model_names(self) -> list[str]:
        return self.names_of(self.names)

    def names_of(self, tiers: Collection[str]) -> list[str]:
        """What clients may ask for who may use these tiers."""
        names = [AUTO, *(name for tier in tiers for name in (tier, self.tiers[tier].model))]
        return list(dict.fromkeys(names))

    def label(self, model: object) -> str:
        """A model name that may stand in a metric."""
        return model if isinstance(model, str) and model in self.model_names else OTHER

    async def watch(self) -> None:
        await asyncio.gather(*(self._watch(worker) for worker in self.workers))

    async def look(self) -> None:
        """Looks at every worker once, all at the same time."""
        await asyncio.gather(*(worker.look() for worker in self.workers))

    async def look_at_new(self) -> None:
        """Looks at those that nobody has looked at yet."""
        await asyncio.gather(*(worker.look() for worker in self.workers if worker.info is None))

    def show_circuits(self) -> None:
        """Every worker's, as they are now."""
        for worker in self.workers:
            for circuit in (worker.breaker, worker.transfers):
                self._metrics.circuit_state.labels(circuit.target).set(circuit.state)

    async def aclose(self, but: Fleet | None = None) -> None:
        """Closes every worker's client, but for those that another fleet has too."""
        for worker in self.workers:
            if but is None or worker not in but.workers:
                await worker.client.aclose()

    async def _watch(self, worker: Worker) -> None:
        while True:
            await asyncio.sleep(self._pause_s(worker) * (0.8 + 0.4 * random.random()))
            was_up = worker.is_up
            try:
                await worker.look()
                if worker.is_up != was_up:
                    log.info("worker_up" if worker.is_up else "worker_down", worker=worker.id)
            except Exception as error:  # a bug must not end the watch
                log.error("watch_failed", worker=worker.id, error=repr(error))

    def _pause_s(self, worker: Worker) -> float:
        """One that is down is asked more often: it may be just about to start."""
        poll_s = self._settings.deadlines.worker_poll_s
        return poll_s if worker.is_up else min(poll_s, DOWN_POLL_S)

    def _gate(self, tier: str) -> Gate:
        if self._before is not None and self._keeps and tier in self._before.gates:
            return self._before.gates[tier]
        limits = self._settings.limits
        gate = Gate(tier, max_running=limits.max_concurrency_per_tier, max_waiting=limits.max_queue_per_tier)
        self._metrics.show_gate(tier, gate)
        return gate

    def _tier(self, tier: TierSettings) -> Tier:
        ids = [worker_id for worker_id, worker in self._settings.workers.items() if worker.tier == tier.name]
        return Tier(tier.name, tier.model, [self._worker(worker_id) for worker_id in ids], self.gates[tier.name])

    def _worker(self, worker_id: str) -> Worker:
        """As it was before where its configuration is; else a new one, which at the same address knows what was known.
        """
        known = self._known(worker_id)
        if known is None:
            return self._new_worker(worker_id)
        if self._keeps:
            return known
        worker = self._new_worker(worker_id)
        worker.learn_from(known)
        return worker

    def _known(self, worker_id: str) -> Worker | None:
        if self._before is None or worker_id not in self._before._settings.workers:
            return None
        was, now = self._before._settings.workers[worker_id], self._settings.workers[worker_id]
        return self._before.tiers[was.tier].workers[worker_id] if (was.tier, was.url) == (now.tier, now.url) else None

    def _new_worker(self, worker_id: str) -> Worker:
        settings = self._settings.workers[worker_id]
        client = WorkerClient(settings.url, self._secret, transport=self._transports.get(worker_id))
        return Worker(
            worker_id,
            settings.tier,
            client,
            gate=self.gates[settings.tier],
            breaker=self._breaker(worker_id),
            transfers=self._breaker(f"{worker_id}/transfer"),
            times=self._settings.deadlines,
            on_restart=self._restarted,
        )

    def _restarted(self, worker_id: str) -> None:
        self._metrics.worker_restarts.labels(worker_id).inc()
        log.info("worker_restarted", worker=worker_id)

    def _breaker(self, target: str) -> Breaker:
        return Breaker(
            target, self._settings.breaker, on_transition=self._metrics.circuit_changed, bell=self._bell
        )
