"""The benchmark of gateways: its pure functions, dropped streams, and a tiny run of kvrelay alone."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from pathlib import Path

import pytest

from benchmarks.gateways.__main__ import main
from benchmarks.gateways.load import Load, LoadResult, Target, is_whole_stream
from benchmarks.gateways.measure import Contender, can_hold, growth_mib, row_of
from benchmarks.gateways.processes import DidNotStart, Server, free_port, running
from benchmarks.gateways.stub import WORD, chunked, frame

WORD_FRAME = frame(choices=[{"delta": {"content": WORD}}])
DONE = b"data: [DONE]\n\n"
ANSWERS = {
    "whole": chunked(WORD_FRAME * 2 + DONE) + chunked(b""),
    "a word too few": chunked(WORD_FRAME + DONE) + chunked(b""),
    "no end": chunked(WORD_FRAME * 2) + chunked(b""),
    "broken off": chunked(WORD_FRAME * 2 + DONE),
}


@pytest.mark.parametrize(("body", "whole"), [(WORD_FRAME * 2 + DONE, True), (WORD_FRAME + DONE, False), (DONE, False)])
def test_whole_stream_has_all_words_and_the_end(body: bytes, whole: bool) -> None:
    assert is_whole_stream(body, 2) is whole


@pytest.mark.parametrize("answer", ANSWERS)
async def test_incomplete_stream_counts_as_dropped(answer: str) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + ANSWERS[answer])
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        load = Load(Target(server.sockets[0].getsockname()[1], "key", "model"), num_words=2)
        outcome = await load.streams(3, num_words=2, every_ms=0)
    assert (outcome.num_answered, outcome.errors) == ((3, 0) if answer == "whole" else (0, 3))


async def test_refused_connection_counts_as_error() -> None:
    outcome = await Load(Target(free_port(), "key", "model"), num_words=2).closed(3, num_connections=2)
    assert (outcome.num_answered, outcome.errors) == (0, 3)


def contender(**fields: object) -> Contender:
    target = Target(1, "key", "model")
    return Contender("one", None, Load(target, num_words=2), 1.0, rss_mib=[1.0], **fields)  # type: ignore[arg-type]


def test_added_latency_is_relative_to_the_upstream() -> None:
    alone = LoadResult(1.0, [1.0] * 100)
    paced = LoadResult(1.0, [3.0] * 98 + [8.0] * 2)
    row = row_of(contender(paced=paced, cpu_ms=[3.0, 1.0, 2.0]), alone, 100)
    assert (row.added_p50_ms, row.added_p99_ms, row.cpu_ms) == (2.0, 7.0, 2.0)


@pytest.mark.parametrize("paced", [LoadResult(2.0, [3.0] * 100), LoadResult(1.0, [3.0] * 99, errors=1), LoadResult()])
def test_missed_rate_reports_no_latency(paced: LoadResult) -> None:
    row = row_of(contender(paced=paced), LoadResult(1.0, [1.0] * 100), 100)
    assert row.added_p50_ms is row.added_p99_ms is None


@pytest.mark.parametrize(("per_s", "can"), [([60.0, 70.0], False), ([60.0, 210.0], True), ([], False)])
def test_slow_gateway_is_not_paced(per_s: list[float], can: bool) -> None:
    assert can_hold(per_s, 200.0) is can


def test_failed_start_reports_the_log(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "raise SystemExit('no such option')"]
    with pytest.raises(DidNotStart, match="no such option"):
        with running(command, port=free_port(), ready_path="/", log=tmp_path / "log", env={}):
            pass


def test_cpu_and_memory_include_children(tmp_path: Path) -> None:
    port = free_port()
    busy = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'while True: pass']);"
    serve = f"import http.server; http.server.test(http.server.SimpleHTTPRequestHandler, port={port}, bind='127.0.0.1')"
    command = [sys.executable, "-c", busy + serve]
    with running(command, port=port, ready_path="/", log=tmp_path / "log", env={}) as server:
        assert isinstance(server, Server)
        before_s = server.cpu_s
        while server.cpu_s < before_s + 0.05:
            pass
        assert server.rss_mib > 10


@pytest.mark.parametrize(
    ("rss_mib", "growth"),
    [([50.0, 90.0, 90.0, 90.0, 90.0], 0.0), ([50.0, 60.0, 70.0, 80.0, 90.0], 4.0), ([50.0], None), ([], None)],
)
def test_growth_is_that_of_the_second_half(rss_mib: list[float], growth: float | None) -> None:
    assert growth_mib(rss_mib, 100_000) == growth


@pytest.mark.slow
def test_tiny_soak(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--only", "kvrelay", "--soak", "--memory-requests", "40", "--connections", "2"]
    assert main([*options, "--json", str(tmp_path / "report.json")]) == 0
    [row] = json.loads((tmp_path / "report.json").read_text())["rows"]
    assert (row["memory_requests"], len(row["rss_mib"]), row["cpu_ms"]) == (40, 11, None)
    assert re.search(rf"kvrelay +40 +{row['rss_mib'][-1]}\n", capsys.readouterr().out)


@pytest.mark.slow
def test_tiny_run_of_kvrelay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"rounds": 1, "requests": 200, "connections": 4, "per-s": 5, "seconds": 0.4, "streams": 5}
    sizes |= {"stream-words": 3, "every-ms": 10, "memory-requests": 20}
    options = [text for name, value in sizes.items() for text in (f"--{name}", str(value))]
    assert main(["--only", "kvrelay", *options, "--json", str(tmp_path / "report.json")]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    [row] = report["rows"]
    assert row["gateway"] == "kvrelay" and row["gateway"] in capsys.readouterr().out
    assert (row["streams_whole"], row["streams_dropped"], row["errors"]) == (5, 0, 0)
    assert row["cpu_ms"] > 0 and row["per_s"] > 0 and row["memory_requests"] == 20 and len(row["rss_mib"]) == 11
    assert report["sizes"]["streams"] == 5 and report["commit"]
