"""The circuit breaker: keeps calls away from a failing target, and lets a few probes through to see if it recovered.

    closed ──failure rate over the window──► open ──jittered wait──► half-open ──enough successes──► closed
                                              ▲                          │
                                              └─────── one failure ──────┘

Pure decisions over an injected clock. Errors that say nothing about the target's health (a client's mistake, a full
queue, a cancellation) are neutral: neither failure nor success.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import Enum, IntEnum

from gateway.errors import CircuitOpen
from gateway.settings import BreakerSettings
from gateway.upstream.deadline import Deadline
from workers.api.errors import KvrelayError, Overloaded


class State(IntEnum):
    """The values of the `circuit_state` gauge."""

    CLOSED = 0
    HALF_OPEN = 1
    OPEN = 2


class Outcome(Enum):
    SUCCESS = "success"
    FAILURE = "failure"
    NEUTRAL = "neutral"


def outcome_of(error: BaseException | None) -> Outcome:
    """What the end of a call says about the target's health."""
    if error is None:
        return Outcome.SUCCESS
    if isinstance(error, (asyncio.CancelledError, GeneratorExit, Overloaded)):
        return Outcome.NEUTRAL
    if isinstance(error, KvrelayError) and error.status < 500:
        return Outcome.NEUTRAL
    return Outcome.FAILURE


class ChangeSignal:
    """Wakes every waiter when something changed. For use on one event loop."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def notify(self) -> None:
        event, self._next = self._next, asyncio.Event()
        event.set()

    async def wait(self, timeout_s: float) -> None:
        """Return at the next change, or after the timeout."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._next.wait()


class Breaker:
    """One target's circuit. `begin` admits a call, whose `end` reports how it ended. `changes` is notified when the
    circuit may admit a call that it rejected before, or will reject longer than was known."""

    def __init__(
        self,
        target: str,
        settings: BreakerSettings,
        *,
        clock: Callable[[], float] = time.monotonic,
        rng: Callable[[], float] = random.random,
        on_transition: Callable[[str, State], None] = lambda target, to: None,
        changes: ChangeSignal | None = None,
    ):
        self.target = target
        self.changes = changes or ChangeSignal()
        self.era = 0  # counts transitions; the result of a call from an earlier era no longer counts
        self._settings = settings
        self._clock = clock
        self._rng = rng
        self._on_transition = on_transition
        self._state = State.CLOSED
        self._outcomes: deque[tuple[float, bool]] = deque()  # (time, failed)
        self._num_failed = 0  # of these
        self._reopens_at = 0.0
        self._probes = 0
        self._successes = 0

    @property
    def state(self) -> State:
        if self._state is State.OPEN and self._clock() >= self._reopens_at:
            self._enter(State.HALF_OPEN)
        return self._state

    @property
    def admits(self) -> bool:
        """Whether a call would be admitted now."""
        state = self.state
        return state is State.CLOSED or (state is State.HALF_OPEN and self._probes < self._settings.num_probes)

    def may_admit_by(self, deadline: Deadline) -> bool:
        """Whether a call may be admitted by the deadline, as far as is known now."""
        if self.state is State.OPEN:
            return self._reopens_at - self._clock() <= deadline.remaining_s
        return self.admits or deadline.remaining_s > 0

    @property
    def admits_in_s(self) -> float:
        """Time until a call is admitted if nothing else happens; infinite while a probe is running."""
        if self.state is State.OPEN:
            return self._reopens_at - self._clock()
        return 0.0 if self.admits else math.inf

    @property
    def retry_after_s(self) -> float:
        """Sent to clients whose call was rejected."""
        return self._settings.open_s

    def begin(self) -> BreakerCall:
        """Raises `CircuitOpen` if the call is not admitted."""
        if not self.admits:
            raise CircuitOpen(f"the circuit of {self.target} is open", retry_after_s=self.retry_after_s)
        is_probe = self._state is State.HALF_OPEN
        self._probes += is_probe
        return BreakerCall(self, self.era, is_probe)

    def record(self, era: int, outcome: Outcome) -> None:
        """Count the outcome of a call that was admitted in `era`."""
        if era != self.era or outcome is Outcome.NEUTRAL:
            return
        settings = self._settings
        if self._state is State.HALF_OPEN:
            self._successes += outcome is Outcome.SUCCESS
            if outcome is Outcome.FAILURE:
                self._enter(State.OPEN)
            elif self._successes >= settings.num_successes:
                self._enter(State.CLOSED)
        elif self._state is State.CLOSED:
            now, outcomes, failed = self._clock(), self._outcomes, outcome is Outcome.FAILURE
            outcomes.append((now, failed))
            self._num_failed += failed
            while len(outcomes) > settings.window or outcomes[0][0] < now - settings.window_s:
                self._num_failed -= outcomes.popleft()[1]
            if len(outcomes) >= settings.min_outcomes and self._num_failed / len(outcomes) >= settings.failure_rate:
                self._enter(State.OPEN)

    def release_probe(self, era: int) -> None:
        if era == self.era:
            self._probes -= 1
            self.changes.notify()

    def _enter(self, state: State) -> None:
        self._state = state
        self.era += 1
        self._probes = self._successes = 0
        self._outcomes.clear()
        self._num_failed = 0
        if state is State.OPEN:
            spread = 1 + self._settings.jitter * (2 * self._rng() - 1)
            self._reopens_at = self._clock() + self._settings.open_s * spread
        self._on_transition(self.target, state)
        self.changes.notify()


class BreakerCall:
    """One admitted call. Its end is recorded once; `succeed` may report early that the target is well."""

    def __init__(self, breaker: Breaker, era: int, is_probe: bool):
        self._breaker = breaker
        self._era = era
        self._is_probe = is_probe
        self._recorded: Outcome | None = None

    def succeed(self) -> None:
        """The target does its work; a later end counts only if it is a failure."""
        self._record(Outcome.SUCCESS)

    def end(self, error: BaseException | None) -> None:
        """After an early success, only a failure is recorded."""
        outcome = outcome_of(error)
        if self._recorded is None:
            self._record(outcome)
        elif outcome is Outcome.FAILURE and self._recorded is Outcome.SUCCESS:
            self._recorded = outcome
            self._breaker.record(self._era, outcome)

    def _record(self, outcome: Outcome) -> None:
        if self._recorded is not None:
            return
        self._recorded = outcome
        if self._is_probe:
            self._breaker.release_probe(self._era)
        self._breaker.record(self._era, outcome)


async def wait_until_one_admits(circuits: Callable[[], Sequence[Breaker]], deadline: Deadline) -> bool:
    """Wait until one of the circuits would admit a call: for a running probe to end, or for an open circuit's retry.

    `circuits` returns the present ones; they share one change signal, which also reports that the list changed. False
    if waiting is pointless: no circuit may admit by the deadline, or each that may had a probe fail meanwhile.
    """
    eras: dict[Breaker, int] = {}
    while not any(circuit.admits for circuit in circuits()):
        hopeful = []
        for circuit in circuits():
            if circuit.may_admit_by(deadline):
                era = eras.setdefault(circuit, circuit.era)
                if circuit.state is not State.OPEN or circuit.era == era:  # else its probe failed meanwhile
                    hopeful.append(circuit)
        if not hopeful:
            return False
        await hopeful[0].changes.wait(min(deadline.remaining_s, *(circuit.admits_in_s for circuit in hopeful)))
    return True
