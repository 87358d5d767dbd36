"""One request in the logs and traces of the gateway and both workers: one id, and no word of its prompt."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import httpx
import pytest
import structlog
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from structlog.testing import capture_logs

from gateway import settings
from gateway.app import create_app
from tests.workers.server.support import SECRET, TALK, ServedWorker, chat_request
from workers.api import tracing
from workers.api.logs import LibraryLogHandler, add_request_id, configure_logs

CANARY = "".join(("can", "ary"))  # split, as a logged traceback holds the source line that raised
UNTRACED = """
import sys
from workers.api import tracing
tracing.start(tracing.TracingSettings(), "service")
with tracing.span("request"):
    print(tracing.headers())
sys.exit(any(name.startswith("opentelemetry") for name in sys.modules))
"""
ESCALATED = {
    "model": "auto",
    "messages": [message.model_dump(exclude_none=True) for message in TALK],
    "max_tokens": 6,
    "temperature": 0,
    "kvrelay": {"policy": "always_escalate"},
}


@asynccontextmanager
async def gateway_over(pair: tuple[ServedWorker, ServedWorker]) -> AsyncIterator[httpx.AsyncClient]:
    """Serve a gateway in front of both workers, all in this process."""
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


async def test_all_logs_carry_the_request_id(pair: tuple[ServedWorker, ServedWorker]) -> None:
    async with gateway_over(pair) as http:
        with capture_logs([add_request_id]) as logged:
            reply = await http.post("/v1/chat/completions", json=ESCALATED, headers={"x-request-id": "mine-1"})
    assert reply.json()["kvrelay"]["path"] == "mapped", reply.text
    lines = [line for line in logged if line.get("request_id") == "mine-1"]
    assert [line["path"] for line in lines if line["event"] == "request"] == ["mapped"]
    assert {line["route"] for line in lines if line["event"] == "call"} >= {
        "/v1/prefix/prefill",
        "/v1/cache/transfer",
        "/v1/cache/{cache_id}/lease",  # which the large worker asks of the small one
        "/v1/chat/completions",
    }
    answer = reply.json()["choices"][0]["message"]["content"]
    assert not [word for word in ("quick brown", "holds keys", answer) if word in str(logged)]


@pytest.fixture
def exported() -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing.use(provider)
    yield exporter
    tracing.use(None)


CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


async def test_one_trace_spans_gateway_and_workers(
    pair: tuple[ServedWorker, ServedWorker], exported: InMemorySpanExporter
) -> None:
    async with gateway_over(pair) as http:
        reply = await http.post("/v1/chat/completions", json=ESCALATED, headers={"traceparent": CALLER})
    spans = {span.context.span_id: span for span in exported.get_finished_spans()}
    assert {f"{span.context.trace_id:032x}" for span in spans.values()} == {CALLER.split("-")[1]}
    parents = {id: span.parent.span_id for id, span in spans.items() if span.parent is not None}
    links = [(spans[id].name, spans[parent].name) for id, parent in parents.items() if parent in spans]
    assert sorted(links) == [
        ("decode", "decode"),
        ("decode", "request"),
        ("lease", "transfer"),
        ("prefill", "prefill"),
        ("prefill", "request"),
        ("prefix", "request"),
        ("route", "request"),
        ("transfer", "request"),
        ("transfer", "transfer"),
    ]
    (request,) = [span for span in spans.values() if span.name == "request"]
    assert request.parent is not None and f"{request.parent.span_id:016x}" == CALLER.split("-")[2]
    assert request.attributes == {
        "gen_ai.request.model": "auto",
        "gen_ai.response.model": "tiny-large",
        "kvrelay.path": "mapped",
    }
    assert "quick brown" not in str([span.to_json() for span in spans.values()]) and reply.status_code == 200


async def test_failed_call_is_marked_in_its_span(served: ServedWorker, exported: InMemorySpanExporter) -> None:
    served.worker.prompts.encode_chat = failing  # type: ignore[assignment]
    await served.http.post("/v1/chat/completions", json=chat_request().model_dump(exclude_none=True))
    (span,) = exported.get_finished_spans()
    assert (span.name, span.attributes, span.events) == ("decode", {"error.type": "ValueError"}, ())


def test_tracing_without_collector_imports_nothing() -> None:
    output = subprocess.run([sys.executable, "-c", UNTRACED], capture_output=True, text=True)
    assert (output.returncode, output.stdout) == (0, "{}\n"), output.stderr


@contextmanager
def logging_as_a_worker() -> Iterator[None]:
    configure_logs(sys.stderr.buffer)
    structlog.configure(cache_logger_on_first_use=False)  # else loggers of later tests keep this stream
    (handler,) = [one for one in logging.root.handlers if isinstance(one, LibraryLogHandler)]
    try:
        yield
    finally:
        structlog.reset_defaults()
        logging.root.removeHandler(handler)


def failing(*args: object) -> None:
    raise ValueError(CANARY)


def json_lines(output: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


async def test_bug_is_logged_by_location_without_its_message(
    served: ServedWorker, capsys: pytest.CaptureFixture[str]
) -> None:
    served.worker.prompts.encode_chat = failing  # type: ignore[assignment]
    body = chat_request().model_dump(exclude_none=True)
    with logging_as_a_worker():
        reply = await served.http.post("/v1/chat/completions", json=body, headers={"x-request-id": "mine-2"})
    assert (reply.status_code, reply.json()["error"]["type"]) == (500, "internal_error")
    output = capsys.readouterr().err
    (bug,) = [line for line in json_lines(output) if line["event"] == "internal_error"]
    assert (bug["error"], bug["request_id"]) == ("ValueError", "mine-2")
    assert "in failing" in bug["traceback"][-1]
    assert CANARY not in output + reply.text


def test_traceback_is_logged_without_its_message(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        raise ValueError(CANARY)
    except ValueError:
        with logging_as_a_worker():
            structlog.get_logger().exception("sweep_failed")
    output = capsys.readouterr().err
    (line,) = json_lines(output)
    assert (line["event"], line["error"]) == ("sweep_failed", "ValueError") and CANARY not in output
