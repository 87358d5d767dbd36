"""One request in the logs of the gateway and of both workers: under one id, and without a word of it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import httpx
import pytest
import structlog
from structlog.testing import capture_logs

from gateway import settings
from gateway.app import create_app
from tests.workers.server.support import SECRET, TALK, Served, chat_request
from workers.process import configure_logging

CANARY = "".join(("can", "ary"))  # a log of the place holds the line that raised it
ESCALATED = {
    "model": "auto",
    "messages": [message.model_dump(exclude_none=True) for message in TALK],
    "max_tokens": 6,
    "temperature": 0,
    "kvrelay": {"policy": "always_escalate"},
}


@asynccontextmanager
async def gateway_over(pair: tuple[Served, Served]) -> AsyncIterator[httpx.AsyncClient]:
    """A gateway in front of both workers, all in this process."""
    names = ("small", "large")
    config = {
        "tiers": [{"name": name, "model": f"tiny-{name}"} for name in names],
        "workers": {name: {"tier": name, "url": f"http://{name}.test"} for name in names},
        "handoff": {"min_tokens": 1, "native_tail": 16},
        "deadlines": {"request_s": 60, "transfer_floor_s": 20, "decode_reserve_s": 1},
    }
    transports = {name: httpx.ASGITransport(served.app) for name, served in zip(names, pair, strict=True)}
    app = create_app(settings.from_values(config), SECRET, transports=transports)
    async with app.router.lifespan_context(app):
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as http:
            yield http


async def test_one_id_is_found_in_all_logs(pair: tuple[Served, Served]) -> None:
    async with gateway_over(pair) as http:
        with capture_logs() as logged:
            reply = await http.post("/v1/chat/completions", json=ESCALATED, headers={"x-request-id": "mine-1"})
    assert reply.json()["kvrelay"]["path"] == "mapped", reply.text
    ours = [line for line in logged if line.get("request_id") == "mine-1"]
    assert [line["path"] for line in ours if line["event"] == "request"] == ["mapped"]
    assert {line["route"] for line in ours if line["event"] == "call"} >= {
        "/v1/prefix/prefill",
        "/v1/cache/transfer",
        "/v1/cache/{cache_id}/lease",  # which the large worker asks of the small one
        "/v1/chat/completions",
    }
    written = reply.json()["choices"][0]["message"]["content"]
    assert not [word for word in ("quick brown", "holds keys", written) if word in str(logged)]


@contextmanager
def logging_as_a_worker() -> Iterator[None]:
    configure_logging()
    try:
        yield
    finally:
        structlog.reset_defaults()


def of_worker(told: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in told.splitlines() if line.startswith("{")]


async def test_a_bug_is_logged_by_its_place_and_not_by_its_words(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*args: object) -> None:
        raise ValueError(CANARY)

    served.worker.prompts.read_chat = fail  # type: ignore[assignment]
    body = chat_request().model_dump(exclude_none=True)
    with logging_as_a_worker():
        reply = await served.http.post("/v1/chat/completions", json=body, headers={"x-request-id": "mine-2"})
    assert (reply.status_code, reply.json()["error"]["type"]) == (500, "internal_error")
    told = capsys.readouterr().err
    (bug,) = [line for line in of_worker(told) if line["event"] == "internal_error"]
    assert (bug["error"], bug["request_id"]) == ("ValueError", "mine-2")
    assert "in fail" in bug["where"][-1]
    assert CANARY not in told + reply.text


def test_a_traceback_is_logged_without_its_words(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        raise ValueError(CANARY)
    except ValueError:
        with logging_as_a_worker():
            structlog.get_logger().exception("sweep_failed")
    told = capsys.readouterr().err
    (line,) = of_worker(told)
    assert (line["event"], line["error"]) == ("sweep_failed", "ValueError") and CANARY not in told
