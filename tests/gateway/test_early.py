"""Early handoffs, which begin while the small model decodes, and what a stream sends before the decision."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

import pytest

from gateway.policies import TokenLogprob, build
from gateway.policies.base import Forecast
from tests.gateway.stack import MESSAGES, Stack, eventually, live_stack, report, right_answer, text
from tests.gateway.test_streaming import chunks, joined, streamed
from workers.api.errors import TransferFailed

POLICY = {"name": "confidence", "threshold": -0.5, "num_tokens": 6, "speculate_after": 2}


def tokens(*logprobs: float) -> list[TokenLogprob]:
    return [TokenLogprob("a", one, (("a", one), ("b", one - 1.0))) for one in logprobs]


@pytest.mark.parametrize(
    ("logprobs", "expected"),
    [
        ([], "open"),
        ([-0.9], "open"),  # one token is too few
        ([-0.9, -0.9], "likely"),
        ([-0.4, -0.4], "open"),
        ([-0.9] * 4, "certain"),  # -3.6 over six tokens is below the threshold for any last two
        ([-3.1], "certain"),
    ],
)
def test_forecast_after_the_first_tokens(logprobs: list[float], expected: Forecast) -> None:
    assert build(POLICY).forecast(tokens(*logprobs)) == expected


@pytest.mark.parametrize("score", ["mean", "quantile", "margin", "entropy"])
def test_a_certain_rejection_holds_for_every_continuation(score: str) -> None:
    draw, num_certain = random.Random(score), 0
    policy = build({"name": "confidence", "score": score, "num_tokens": 8})
    for _ in range(300):
        scale = draw.choice([0.05, 0.5, 3.0])
        whole = tokens(*(-draw.expovariate(1 / scale) for _ in range(8)))
        for count in range(1, 9):
            if policy.forecast(whole[:count]) == "certain":
                num_certain += 1
                assert not any(policy.judge(whole[:length]).accept for length in range(count, 9))
    assert num_certain > 20, "too few certain cases"


def test_a_buffered_answer_is_never_certain() -> None:
    assert build(POLICY | {"streaming": "buffer"}).forecast(tokens(-9.0, -9.0)) == "likely"
    assert build(POLICY | {"speculate_after": None}).forecast(tokens(-0.9, -0.9)) == "open"


@pytest.mark.parametrize("speculate_after", [2, None])
async def test_an_early_transfer_overlaps_the_small_decode(speculate_after: int | None) -> None:
    async with live_stack(policy=POLICY | {"speculate_after": speculate_after}, deadlines={"request_s": 60.0}) as stack:
        stack.small.logprob, stack.small.token_s = -0.7, 0.2  # likely after two tokens, certain after five
        stack.small.stall("cached_chat", after=3)
        request = asyncio.create_task(stack.chat())
        if speculate_after:
            await eventually(lambda: bool(stack.large.requests("transfer")), within_s=20)
        else:
            await eventually(lambda: bool(stack.small.requests("cached_chat")), within_s=20)
            await asyncio.sleep(1.0)
            assert not stack.large.requests("transfer"), "the small answer is not rejected yet"
        stack.small.heal()  # it continues to decode
        kvrelay = report(reply := await request)
        assert text(reply) == right_answer(stack.large, MESSAGES)
        assert (kvrelay["path"], kvrelay["early_handoff"]) == ("mapped", speculate_after is not None)
        assert len(stack.large.requests("transfer")) == 1
        await eventually(lambda: stack.small.num_disconnects == 1)
        assert stack.metric("early_handoffs_total", result="used") == (1 if speculate_after else 0)


async def test_a_certain_escalation_does_not_wait_for_more_tokens() -> None:
    async with live_stack(policy=POLICY) as stack:
        stack.small.logprob = -9.0
        stack.small.stall("cached_chat", after=1)
        kvrelay = report(await stack.chat())
        assert (kvrelay["path"], kvrelay["reason"], kvrelay["confidence"]) == ("mapped", "unsure", -9.0)


@pytest.mark.parametrize("transfer_s", [0.0, 30.0])
async def test_a_wrong_guess_does_not_delay_the_answer(transfer_s: float) -> None:
    async with live_stack(policy=POLICY) as stack:
        stack.small.first_logprobs, stack.small.token_s = (-0.9, -0.9), 0.1
        stack.large.delay("transfer", transfer_s)
        started = time.monotonic()
        reply = await stack.chat()
        assert time.monotonic() - started < 20
        assert text(reply) == right_answer(stack.small, MESSAGES)
        assert report(reply)["transfer_ms"] is None and report(reply)["early_handoff"] is False
        await eventually(lambda: stack.metric("early_handoffs_total", result="dropped") == 1)
        assert len(stack.large.requests("transfer")) == 1
        assert not stack.large.requests("drop"), "another request may be answering from the same cache"
        assert not (transfer_s and stack.large.caches), "the transfer was cancelled"
        assert stack.metric("num_requests_running", tier="large") == 0


async def test_a_failed_early_handoff_falls_back() -> None:
    async with live_stack(policy=POLICY) as stack:
        stack.small.logprob, stack.small.token_s = -0.7, 0.1
        stack.large.fail("transfer", TransferFailed("gone"))
        reply = await stack.chat()
        assert (report(reply)["path"], text(reply)) == ("fallback:transfer_failed", right_answer(stack.large, MESSAGES))


async def time_stream(stack: Stack) -> tuple[float, float]:
    """Return the seconds until the client receives the first text, and until the end."""
    started, first = time.monotonic(), None
    body: dict[str, Any] = {"model": "auto", "messages": MESSAGES, "stream": True}
    async with stack.http.stream("POST", "/v1/chat/completions", json=body) as reply:
        async for line in reply.aiter_lines():
            first = first or (time.monotonic() if '"content":"fake' in line else None)
    assert first is not None
    return first - started, time.monotonic() - started


@pytest.mark.parametrize("streaming", ["decide_first", "buffer", "stream_small"])
async def test_streaming_mode_decides_what_is_sent_before_acceptance(streaming: str) -> None:
    """Seven words, one every 0.1 s. The policy judges three, all, or none of them."""
    policy = POLICY | {"num_tokens": 3, "streaming": streaming}
    async with live_stack(policy=policy) as stack:
        stack.small.token_s = 0.1
        first_s, end_s = await time_stream(stack)
        assert first_s > 0.7 if streaming == "buffer" else end_s - first_s > 0.25
        stack.small.logprob = -2.0
        _, frames = await streamed(stack)
        by_small = streaming == "stream_small"
        assert joined(frames) == right_answer(stack.small if by_small else stack.large, MESSAGES)
        assert chunks(frames)[-1]["kvrelay"]["reason"] == ("stream_small" if by_small else "unsure")
