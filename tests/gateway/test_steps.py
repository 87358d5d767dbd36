"""`next_step` alone: the next step after given attempts, without calls to workers."""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway.errors import NoUsableWorker
from gateway.policies import Verdict
from gateway.request.route import Parts, choose
from gateway.request.steps import next_step
from gateway.request.turn import (
    Answer,
    CacheRef,
    Deliver,
    Escalate,
    Fail,
    Fallback,
    Judge,
    Prefill,
    Step,
    Transfer,
    Turn,
)
from gateway.schemas import ChatCompletionRequest
from gateway.upstream.completion import Completion
from gateway.upstream.deadline import Deadline
from tests.gateway.stack import MESSAGES, Stack, in_process
from workers.api.errors import (
    CacheNotFound,
    ContextLengthExceeded,
    DeadlineExceeded,
    InvalidRequest,
    KvrelayError,
    TransferFailed,
    WorkerUnavailable,
)

GONE, REFUSED = WorkerUnavailable("gone"), TransferFailed("refused")


class Stream:
    """A stub of an open answer stream."""

    completion = Completion()
    first_at = 0.0


class Script:
    """A turn whose attempts have the outcomes that a test sets."""

    def __init__(self, stack: Stack, turn: Turn):
        self.turn = turn
        self._stack = stack

    @property
    def next(self) -> Step | Fail:
        before = copy.copy(self.turn.attempts)
        step = next_step(self.turn)
        assert self.turn.attempts == before, "next_step changed the attempts"
        return step

    def take(self, **outcome: Any) -> Script:
        """Take the next step with this outcome, by default success."""
        step = self.next
        assert not isinstance(step, Fail), step.error
        attempt = self.turn.begin(step)
        if not outcome and isinstance(step, (Prefill, Transfer)):
            worker = next(iter(step.tier.workers.values()))
            outcome = {"cache": CacheRef(worker, "kvc-" + "0" * 32, 1000, "prefill")}
        elif not outcome and isinstance(step, Answer):
            outcome = {"stream": Stream()}
        for name, value in outcome.items():
            setattr(attempt, name, value)
        return self

    def reject(self) -> Script:
        return self.take(verdict=Verdict(accept=False, reason="unsure"))


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    async with in_process() as stack:
        yield stack


async def script(stack: Stack, **fields: Any) -> Script:
    snapshot = stack.app.state.gateway.current
    parts: Parts = snapshot.parts
    request = ChatCompletionRequest.model_validate({"model": "auto", "messages": MESSAGES} | fields)
    tenant = snapshot.tenants.authenticate(None)
    turn = Turn(snapshot.settings, tenant, request, Deadline.after(60.0), 0.0)
    turn.route = await choose(parts, turn)
    turn.lookups = await parts.prefixes.look_up(turn.messages, None, tenant, turn.route.tiers, is_chat=True)
    return Script(stack, turn)


def describe(step: Step | Fail) -> str:
    match step:
        case Answer(tier=tier, purpose=purpose):
            return f"{tier.name} {purpose}"
        case Fail(error=error):
            return f"fail {error.code}"
        case _:
            return f"{step.tier.name} {type(step).__name__.lower()}"


async def test_an_accepted_answer_is_delivered(stack: Stack) -> None:
    turn = (await script(stack)).take()
    assert describe(turn.next) == "small fast"
    assert describe(turn.take().next) == "small judge"
    done = turn.take(verdict=Verdict(accept=True, reason="confident"))
    assert isinstance(done.next, Deliver) and done.turn.path == "prefill"


async def test_a_rejected_answer_escalates_by_handoff(stack: Stack) -> None:
    turn = (await script(stack)).take().take().reject()
    steps = [describe(turn.next), *(describe(turn.take().next) for _ in range(3))]
    assert steps == ["large escalate", "large transfer", "large fast", "large deliver"]


@pytest.mark.parametrize(
    ("attempt", "error", "step", "path"),
    [
        ("prefill", GONE, "large full_prefill", "fallback:small_worker_unavailable"),
        ("prefill", ContextLengthExceeded("too long"), "large full_prefill", "fallback:small_context_length_exceeded"),
        ("prefill", InvalidRequest("no template"), "fail invalid_request", "prefill"),
        ("answer", CacheNotFound("evicted"), "large full_prefill", "fallback:small_cache_not_found"),
        ("judge", GONE, "large full_prefill", "fallback:small_worker_unavailable"),
        ("transfer", REFUSED, "large full_prefill", "fallback:transfer_failed"),
        ("handed_over", GONE, "large full_prefill", "fallback:large_worker_unavailable"),
    ],
)
async def test_a_failed_fast_path_is_replaced_by_a_full_prefill(
    stack: Stack, attempt: str, error: KvrelayError, step: str, path: str
) -> None:
    turn = await script(stack)
    if attempt in ("answer", "judge", "transfer", "handed_over"):
        turn.take()
    if attempt in ("judge", "transfer", "handed_over"):
        turn.take()
    if attempt in ("transfer", "handed_over"):
        turn.reject().take()
    if attempt == "handed_over":
        turn.take()
    assert describe(turn.take(error=error).next) == step
    if not isinstance(turn.next, Fail):
        turn.take()
    assert turn.turn.path == path


async def test_the_small_model_is_the_last_resort_after_a_failed_full_prefill(stack: Stack) -> None:
    turn = (await script(stack, kvrelay={"policy": "always_escalate"})).take().take().take(error=REFUSED)
    large = stack.app.state.gateway.parts.fleet.worker("large-0")
    turn.take(error=GONE, worker=large)
    again = turn.next
    assert isinstance(again, Answer) and again.avoid == ("large-0",)
    last = turn.take(error=NoUsableWorker("none left")).next
    assert isinstance(last, Answer) and last.purpose == "last_resort" and last.tier.name == "small"
    assert last.fallback == Fallback("worker_unavailable", "large"), "the worker's error, not the lack of workers"
    assert describe(turn.take(error=GONE).next) == "fail worker_unavailable"


async def test_a_named_model_is_not_replaced(stack: Stack) -> None:
    turn = await script(stack, model="large")
    assert describe(turn.next) == "large full_prefill"
    assert describe(turn.take(error=DeadlineExceeded("late")).next) == "fail deadline_exceeded"


async def test_the_phase_is_that_of_the_latest_attempt(stack: Stack) -> None:
    turn = await script(stack)
    phases = [turn.turn.phase]
    for outcome in ({}, {}, {"verdict": Verdict(accept=False, reason="unsure")}, {}, {}, {}, {}):
        turn.take(**outcome)
        phases.append(turn.turn.phase)
    small, large = ["small_prefill", *["small_answer"] * 3], ["transfer", "large_answer", "stream"]
    assert phases == ["admission", *small, *large]
    kinds = [type(attempt.step) for attempt in turn.turn.attempts]
    assert kinds == [Prefill, Answer, Judge, Escalate, Transfer, Answer, Deliver]
