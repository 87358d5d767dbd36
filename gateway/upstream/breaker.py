"""The circuit breaker: keeps calls away from a worker that fails, and lets a few through to see whether it is back.

    closed ──rate of failures over the window──► open ──jittered wait──► half-open ──enough successes──► closed
                                                   ▲                        │
                                                   └────── one failure ─────┘

Pure decisions over an injected clock; the caller carries them out, and may wait for them to change. What says nothing
about the worker's health (a client's mistake, a full queue, a cancellation) is neutral: neither failure nor success.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum, IntEnum

from pydantic import BaseModel, ConfigDict, Field

from gateway.bell import Bell
from gateway.errors import CircuitOpen
from gateway.upstream.deadline import Deadline
from workers.api.config import Seconds
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


class BreakerSettings(BaseModel):
    """Opens when, of at least `min_outcomes` outcomes within the last `window_s`, a share of `failure_rate` failed."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    window: int = Field(default=20, ge=1)
    window_s: Seconds = 30.0
    min_outcomes: int = Field(default=4, ge=1)
    failure_rate: float = Field(default=0.5, gt=0, le=1)
    open_s: Seconds = 2.0
    jitter: float = Field(default=0.2, ge=0, lt=1)
    num_probes: int = Field(default=1, ge=1)
    num_successes: int = Field(default=2, ge=1)


def outcome_of(error: BaseException | None) -> Outcome:
    """What a call's end says about the health of the one that was called."""
    if error is None:
        return Outcome.SUCCESS
    if isinstance(error, (asyncio.CancelledError, GeneratorExit, Overloaded)):
        return Outcome.NEUTRAL
    if isinstance(error, KvrelayError) and error.status < 500:
        return Outcome.NEUTRAL
    return Outcome.FAILURE


class Breaker:
    """One target's circuit. `attempt` admits a call, and its `end` tells how it ended. The `bell` is rung
    when it may admit whom it did not before, or will not for longer than was known."""

    def __init__(
        self,
        target: str,
        settings: BreakerSettings,
        *,
        clock: Callable[[], float] = time.monotonic,
        rng: Callable[[], float] = random.random,
        on_transition: Callable[[str, State], None] = lambda target, to: None,
        bell: Bell | None = None,
    ):
        self.target = target
        self.bell = bell or Bell()
        self.era = 0  # counts transitions; a result admitted in an earlier era no longer counts
        self._settings = settings
        self._clock = clock
        self._rng = rng
        self._on_transition = on_transition
        self._state = State.CLOSED
        self._outcomes: deque[tuple[float, bool]] = deque()  # (when, failed)
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
        """Whether a call would be let through now."""
        state = self.state
        return state is State.CLOSED or (state is State.HALF_OPEN and self._probes < self._settings.num_probes)

    def may_admit_by(self, by: Deadline) -> bool:
        """Whether a call may be let through until then, for all that is known now."""
        if self.state is State.OPEN:
            return self._reopens_in_s <= by.remaining_s
        return self.admits or by.remaining_s > 0

    @property
    def admits_in_s(self) -> float:
        """When a call will be let through, if nothing happens before: never, beside a trial under way."""
        return self._reopens_in_s if self.state is State.OPEN else 0.0 if self.admits else math.inf

    @property
    def retry_after_s(self) -> float:
        """What to tell those that are not let through."""
        return self._settings.open_s

    def attempt(self) -> Attempt:
        """Raises `CircuitOpen` where the call is not let through."""
        if not self.admits:
            raise CircuitOpen(f"the circuit of {self.target} is open", retry_after_s=self.retry_after_s)
        probing = self._state is State.HALF_OPEN
        self._probes += probing
        return Attempt(self, self.era, probing)

    @property
    def _reopens_in_s(self) -> float:
        return self._reopens_at - self._clock()

    def _record(self, era: int, outcome: Outcome) -> None:
        if era != self.era or outcome is Outcome.NEUTRAL:
            return
        if self._state is State.HALF_OPEN:
            self._record_probe(outcome)
        elif self._state is State.CLOSED:
            self._note(outcome is Outcome.FAILURE)
            if self._is_failing:
                self._enter(State.OPEN)

    def _record_probe(self, outcome: Outcome) -> None:
        self._successes += outcome is Outcome.SUCCESS
        if outcome is Outcome.FAILURE:
            self._enter(State.OPEN)
        elif self._successes >= self._settings.num_successes:
            self._enter(State.CLOSED)

    def _release(self, era: int) -> None:
        if era == self.era:
            self._probes -= 1
            self.bell.ring()

    def _note(self, failed: bool) -> None:
        """The outcome joins the window, and those leave that are too old or too many."""
        now, outcomes, settings = self._clock(), self._outcomes, self._settings
        outcomes.append((now, failed))
        self._num_failed += failed
        while len(outcomes) > settings.window or outcomes[0][0] < now - settings.window_s:
            self._num_failed -= outcomes.popleft()[1]

    @property
    def _is_failing(self) -> bool:
        num_recent = len(self._outcomes)
        enough = num_recent >= self._settings.min_outcomes
        return enough and self._num_failed / num_recent >= self._settings.failure_rate

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
        self.bell.ring()


async def until_one_admits(circuits: Callable[[], Sequence[Breaker]], by: Deadline) -> bool:
    """Waits until one of the circuits would let a call through: for the end of a trial under way, or for the time to
    try again. `circuits` tells which there are now; all share a bell, which is rung when there are others, too.

    False where none is left to wait for: none may admit until then, or all that may had a trial fail meanwhile.
    """
    eras: dict[Breaker, int] = {}
    while not any(circuit.admits for circuit in circuits()):
        hopeful = [
            circuit
            for circuit in circuits()
            if circuit.may_admit_by(by) and not _has_failed_since(circuit, eras.setdefault(circuit, circuit.era))
        ]
        if not hopeful:
            return False
        await hopeful[0].bell.heard(min(by.remaining_s, *(circuit.admits_in_s for circuit in hopeful)))
    return True


def _has_failed_since(circuit: Breaker, era: int) -> bool:
    return circuit.state is State.OPEN and circuit.era != era


class Attempt:
    """One admitted call. What ends it is recorded once; `succeed` may say early that the target is well."""

    def __init__(self, breaker: Breaker, era: int, probing: bool):
        self._breaker = breaker
        self._era = era
        self._probing = probing
        self._settled: Outcome | None = None

    def succeed(self) -> None:
        """The target does its work; how the call ends later matters only if it ends badly."""
        self._settle(Outcome.SUCCESS)

    def end(self, error: BaseException | None) -> None:
        """Records the end; a second end is only heard when it is a failure after an early success."""
        outcome = outcome_of(error)
        if self._settled is None:
            self._settle(outcome)
        elif outcome is Outcome.FAILURE and self._settled is Outcome.SUCCESS:
            self._settled = outcome
            self._breaker._record(self._era, outcome)

    def _settle(self, outcome: Outcome) -> None:
        if self._settled is not None:
            return
        self._settled = outcome
        if self._probing:
            self._breaker._release(self._era)
        self._breaker._record(self._era, outcome)
