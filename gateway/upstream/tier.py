"""`Tier`: equal workers behind one public model name, and which of them is called next."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from gateway.errors import NoUsableWorker
from gateway.upstream.breaker import Breaker, State, wait_until_one_admits
from gateway.upstream.deadline import Deadline
from gateway.upstream.limits import Gate
from gateway.upstream.worker import Worker
from workers.api.schemas import WorkerInfo

AFFINITY_SLACK = 4  # calls in flight: a worker that holds the prefix may be this much busier than another
DOWN_RETRY_S = 2.0  # sent to clients if no worker is usable for another reason than a circuit


class Tier:
    """Equal workers behind one public model name, and the gate to them."""

    def __init__(self, name: str, model: str, workers: Sequence[Worker], gate: Gate):
        self.name = name
        self.model = model
        self.workers = {worker.id: worker for worker in workers}
        self._gate = gate

    # State

    @property
    def is_usable(self) -> bool:
        """Some worker passed a health check, and its circuit admits calls."""
        return any(worker.is_usable and worker.info is not None for worker in self.workers.values())

    @property
    def is_ready(self) -> bool:
        return any(worker.is_ready for worker in self.workers.values())

    @property
    def response_formats(self) -> list[str]:
        """The types that every known worker supports."""
        return [one for info in self._infos[:1] for one in info.response_formats if self.supports_format(one)]

    def supports_format(self, form: str) -> bool:
        """Whether no known worker lacks this type. If none is known yet, the call will show."""
        return all(form in info.response_formats for info in self._infos)

    @property
    def _infos(self) -> list[WorkerInfo]:
        return [worker.info for worker in self.workers.values() if worker.info is not None]

    # Choice

    def pick(self, preferred: str | None = None, avoid: Collection[str] = ()) -> Worker:
        """The preferred worker if it is usable and not much busier than another; else the least busy one, and of
        several such the one that was called least. Raises `NoUsableWorker`."""
        return self._pick_among([worker for worker in self._in_service(avoid) if worker.is_usable], preferred)

    def pick_for_transfer(self, preferred: str | None = None) -> Worker:
        """As `pick`, among the workers that accept a transfer now; among all usable ones if none does."""
        usable = [worker for worker in self.workers.values() if worker.is_usable]
        return self._pick_among([worker for worker in usable if worker.transfers.admits] or usable, preferred)

    def _pick_among(self, usable: Sequence[Worker], preferred: str | None = None) -> Worker:
        if not usable:
            waits_s = [worker.breaker.retry_after_s for worker in self._in_service()]
            raise NoUsableWorker(
                f"no worker of tier {self.name} is usable now", retry_after_s=min(waits_s, default=DOWN_RETRY_S)
            )
        least = min(usable, key=lambda worker: (worker.num_in_flight, worker.num_begun))
        favourite = next((worker for worker in usable if worker.id == preferred), least)
        return favourite if favourite.num_in_flight <= least.num_in_flight + AFFINITY_SLACK else least

    def _in_service(self, avoid: Collection[str] = ()) -> list[Worker]:
        return [worker for worker in self.workers.values() if worker.is_in_service and worker.id not in avoid]

    # Waiting

    async def choose(
        self, *, preferred: str | None = None, avoid: Collection[str] = (), wait: Deadline | None = None
    ) -> Worker:
        """As `pick`, but if no worker is usable, wait in the tier's queue up to the wait budget for the first that is.
        If its circuit then rejects the call (`CircuitOpen`: another call took the probe), choose again."""
        await self._wait_for_circuit(lambda: [worker.breaker for worker in self._in_service(avoid)], wait)
        return self.pick(preferred, avoid)

    async def choose_for_transfer(self, wait: Deadline | None) -> Worker:
        """As `choose`, for a transfer, which the worker's transfer circuit has to admit. A worker whose answers fail is
        never chosen, since its new cache is there to answer from."""
        await self._wait_for_circuit(self._transfer_circuits, wait)
        usable = [worker for worker in self.workers.values() if worker.is_usable and worker.transfers.admits]
        return self._pick_among(usable)

    def _transfer_circuits(self) -> list[Breaker]:
        """For each worker whose answers do not fail: the circuit that has yet to admit a transfer."""
        workers = [worker for worker in self._in_service() if worker.breaker.state is not State.OPEN]
        return [worker.transfers if worker.breaker.admits else worker.breaker for worker in workers]

    async def _wait_for_circuit(self, circuits: Callable[[], Sequence[Breaker]], wait: Deadline | None) -> None:
        if wait is not None and not any(circuit.admits for circuit in circuits()):
            with self._gate.queued():
                await wait_until_one_admits(circuits, wait)
