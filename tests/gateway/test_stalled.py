"""A worker that stalls in mid-answer, over real sockets: another answer replaces it within the deadline."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway.request.steps import chunk_interval_s, max_gap_s
from gateway.request.turn import Turn
from gateway.schemas import ChatCompletionRequest
from gateway.settings import from_values
from gateway.state.tenants import Tenants
from gateway.upstream.deadline import Deadline
from tests.gateway.stack import MESSAGES, Stack, live_stack, report, right_answer, text, values
from workers.api.schemas import Message

PATHS = ("mapped", "fallback")
REQUEST_S = 5.0
RATE = {"assumed_prefill_tokens_per_s": 2000.0, "transfer_floor_s": 1.5}  # leaves time for every path
DEADLINES = {"request_s": REQUEST_S, "decode_reserve_s": 2.5, "token_gap_s": 0.4} | RATE


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    async with live_stack(deadlines=DEADLINES) as stack:
        yield stack


async def test_a_small_answer_that_stalls_after_judgement_is_replaced(stack: Stack) -> None:
    stack.small.stall("cached_chat", after=5)
    started = time.monotonic()
    reply = await stack.chat()
    assert time.monotonic() - started < REQUEST_S / 2, "the token gap is bounded, not just the whole request"
    assert text(reply) == right_answer(stack.large, MESSAGES)
    assert report(reply)["path"] == "fallback:small_deadline_exceeded"


async def test_a_large_answer_that_stalls_on_a_mapped_cache_is_replaced(stack: Stack) -> None:
    stack.large.stall("cached_chat", after=1)
    reply = await stack.escalate()
    assert text(reply) == right_answer(stack.large, MESSAGES)
    assert report(reply)["path"] == "fallback:large_deadline_exceeded"
    assert len(stack.large.requests("chat")) == 1
    counted = {path: stack.metric("time_to_first_token_seconds_count", tier="large", path=path) for path in PATHS}
    assert counted == {"mapped": 0, "fallback": 1}, "counts the delivered answer, not the stalled one"


async def test_a_large_answer_that_stalls_on_every_path_is_replaced(stack: Stack) -> None:
    """The small model's answer is delivered instead."""
    for call in ("chat", "cached_chat"):
        stack.large.stall(call, after=1)
    reply = await stack.escalate()
    assert text(reply) == right_answer(stack.small, MESSAGES)
    assert (report(reply)["tier"], report(reply)["path"]) == ("small", "fallback:large_deadline_exceeded")
    assert stack.metric("full_prefill_fallback_total", reason="large_deadline_exceeded") == 1


async def test_a_large_answer_that_stalls_before_its_first_token_is_replaced(stack: Stack) -> None:
    for call in ("chat", "cached_chat"):
        stack.large.stall(call, after=0)
    started = time.monotonic()
    reply = await stack.escalate()
    assert text(reply) == right_answer(stack.small, MESSAGES)
    assert time.monotonic() - started < REQUEST_S


async def test_a_slow_answer_is_not_replaced() -> None:
    """While tokens arrive within the gap, the total time does not matter."""
    async with live_stack(deadlines=DEADLINES | {"token_gap_s": 1.0}) as stack:
        stack.large.token_s = 0.2  # seven words take longer than the gap
        reply = await stack.escalate()
        assert (text(reply), report(reply)["path"]) == (right_answer(stack.large, MESSAGES), "mapped")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("remaining_s", [0.1, 1.0, 60.0])
@pytest.mark.parametrize("token_gap_s", [0.1, 10.0])
def test_the_token_gap_allows_for_the_chunk_interval(stream: bool, remaining_s: float, token_gap_s: float) -> None:
    turn = new_turn({"stream": stream}, remaining_s, token_gap_s)
    assert max_gap_s(turn) <= token_gap_s
    assert max_gap_s(turn) >= 2 * chunk_interval_s(turn)
    assert bool(chunk_interval_s(turn)) is not stream


def test_the_token_gap_does_not_apply_during_an_agreement_probe() -> None:
    turn = new_turn({"kvrelay": {"agreement_probe": 8}}, remaining_s=60.0, token_gap_s=1.0)
    assert max_gap_s(turn) == pytest.approx(60.0, abs=1.0)


def new_turn(fields: dict[str, Any], remaining_s: float, token_gap_s: float) -> Turn:
    settings = from_values(values(deadlines={"token_gap_s": token_gap_s}))
    request = ChatCompletionRequest.model_validate({"model": "auto", "messages": [Message(**MESSAGES[-1])]} | fields)
    return Turn(settings, Tenants(settings, "secret").authenticate(None), request, Deadline.after(remaining_s), 0.0)


async def test_a_named_model_has_the_whole_deadline() -> None:
    async with live_stack(deadlines={"request_s": 1.0, "token_gap_s": 0.1}) as stack:
        stack.large.stall("chat", after=1)
        started = time.monotonic()
        reply = await stack.chat(model="large")
        assert reply.status_code == 504
        assert time.monotonic() - started > 0.9
