"""The soak's checks: every kind of problem is found, and nothing else is reported."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from tools.commands import soak as command
from tools.soak.checks import FRESH_TOKENS, SLACK_S, violations
from tools.soak.faults import FaultInjector, Outage, plan
from tools.soak.load import Tally
from tools.soak.requests import RequestWriter, SoakExchange, SoakRequest
from tools.soak.run import SoakReport, run_until
from tools.soak.watch import BOUNDS, MEASURES, ProcessSample, sample_process, slopes
from tools.stack import StackError

REQUEST_S = 30.0
CANARIES = {"kumonasovi", "tabafegozi"}
PROMPT = [{"role": "system", "content": "The password is kumonasovi."}, {"role": "user", "content": "What is it?"}]
MAPPED = {"tier": "large", "path": "mapped", "mapped_tokens": 200, "handoff_tokens": 204}
OVERLOADED = {"type": "overloaded", "code": "no_usable_worker", "message": "none is usable"}
WAIT = {"retry-after": "2"}


def request(
    model: str = "auto", *, stream: bool = False, refused_with: tuple[int, ...] = (), **options: Any
) -> SoakRequest:
    body = {"model": model, "messages": PROMPT, "max_tokens": 4, "stream": stream, "kvrelay": options}
    return SoakRequest(body, refused_with=refused_with)


def answered(sent: SoakRequest | None = None, **changes: Any) -> SoakExchange:
    """A correct answer, in time."""
    kvrelay = {"tier": "large", "path": "prefill", "mapped_tokens": 0, "cached_tokens": 0}
    whole = SoakExchange("ashwood", sent or request(), 0.0, ended_at=1.0, ended="whole", status=200, kvrelay=kvrelay)
    return replace(whole, **changes)


def failed(sent: SoakRequest | None = None, status: int = 503, error: Any = OVERLOADED, **changes: Any) -> SoakExchange:
    return answered(sent, ended="error", status=status, error=error, headers=WAIT, kvrelay={}, **changes)


@pytest.mark.parametrize(
    ("kind", "exchange"),
    [
        ("leak_of_text", answered(text="It is Tabafegozi.")),
        ("leak_of_text", answered(ended="hung_up", text="tabafegozi")),
        ("late", answered(ended_at=REQUEST_S + SLACK_S + 0.1)),
        ("late", failed(request(refused_with=(400,)), 400, ended_at=REQUEST_S + SLACK_S + 0.1)),
        ("error", answered(ended="cut", status=None)),
        ("error", failed()),
        ("error", failed(error={"type": "internal_error", "code": "internal_error", "message": "a bug"}, status=500)),
        ("error", failed(request(refused_with=(400,)), 404)),
        ("error", answered(request(refused_with=(400,)))),
        ("wrong_answer", answered(request("large"), kvrelay=MAPPED)),
        ("wrong_answer", answered(request(exact=True), kvrelay=MAPPED)),
        ("wrong_answer", answered(request(no_cache=True), kvrelay=MAPPED)),
        ("wrong_answer", answered(kvrelay=MAPPED | {"path": "exact"})),
        ("wrong_answer", answered(kvrelay=MAPPED | {"mapped_tokens": 0})),
        ("wrong_answer", answered(request("small"))),
        ("wrong_answer", answered(kvrelay={})),
        ("wrong_answer", answered(is_fresh=True, kvrelay=MAPPED | {"handoff_tokens": None})),
        ("wrong_answer", answered(is_fresh=True, kvrelay={"path": "exact", "cached_tokens": FRESH_TOKENS + 1})),
    ],
)
def test_violations_are_found(kind: str, exchange: SoakExchange) -> None:
    assert [found.kind for found in violations(exchange, (), CANARIES, REQUEST_S)] == [kind]


@pytest.mark.parametrize(
    "exchange",
    [
        answered(),
        answered(text="It is kumonasovi.", kvrelay=MAPPED, is_fresh=True),
        answered(request("large")),
        answered(ended_at=REQUEST_S, kvrelay={"path": "exact", "cached_tokens": 500}),
        answered(ended="hung_up", status=None),
        failed(request(refused_with=(400, 413)), 413),
    ],
)
def test_valid_exchanges_pass(exchange: SoakExchange) -> None:
    assert violations(exchange, (), CANARIES, REQUEST_S) == []


@pytest.mark.parametrize(
    ("exchange", "broken", "is_excused"),
    [
        (failed(request("large")), {"large"}, True),
        (failed(request("large")), {"small"}, False),
        (failed(request(refused_with=(400,))), {"large"}, True),
        (failed(request()), {"large"}, False),
        (failed(request()), {"small", "large"}, True),
        (failed(request(stream=True), status=200), {"small"}, True),
        (failed(request(), error=OVERLOADED | {"type": "internal_error"}), {"small", "large"}, False),
        (failed(request("large"), error=OVERLOADED | {"code": None}), {"large"}, False),
        (replace(failed(request("large")), headers={}), {"large"}, False),
        (answered(request("large"), ended="cut"), {"small", "large"}, False),
        (answered(request("large"), text="tabafegozi"), {"small", "large"}, False),
    ],
)
def test_errors_are_excused_by_broken_tiers(exchange: SoakExchange, broken: set[str], is_excused: bool) -> None:
    assert (not violations(exchange, broken, CANARIES, REQUEST_S)) == is_excused


def samples(
    life: int = 0, *, num: int = 300, level: float = 1e6, per_s: float = 0.0, spread: float = 0.0
) -> list[ProcessSample]:
    """One process sampled once a second, with equal values of all measures."""
    rng = random.Random(life)
    values = [int(level + per_s * second + rng.uniform(-spread, spread)) for second in range(num)]
    return [
        ProcessSample("large-0", life, 1000.0 * life + second, value, value, value, value, value)
        for second, value in enumerate(values)
    ]


@pytest.mark.parametrize("measure", MEASURES)
def test_a_leak_is_found(measure: str) -> None:
    leaking = samples(per_s=10 * BOUNDS[measure] / 3600, spread=BOUNDS[measure] / 100, level=0)
    assert [one.is_leak for one in slopes(leaking, 300) if one.measure == measure] == [True]


@pytest.mark.parametrize("measure", MEASURES)
def test_noise_is_not_a_leak(measure: str) -> None:
    noisy = samples(spread=BOUNDS[measure] / 100, level=BOUNDS[measure])
    assert [one.is_leak for one in slopes(noisy, 300) if one.measure == measure] == [False]


def test_slope_has_a_level_for_each_life_and_skips_the_warm_up() -> None:
    filling = [replace(one, memory=10**9 * int(one.at_s)) for one in samples(num=60)]
    starting = [replace(one, memory=10**9 * int(one.at_s), tasks=None) for one in samples(3, num=90)]
    lives = [*filling, *starting, *(one for life in (1, 2) for one in samples(life, level=life * 1e8, per_s=5.0))]
    memory = slopes(lives, 180)[0]
    assert (memory.measure, memory.per_minute) == ("memory", pytest.approx(300))


def test_slope_needs_enough_samples() -> None:
    assert slopes(samples(num=9), 9.0) == []


def test_sample_of_a_real_process() -> None:
    hold = "import sys, time; kept = bytearray(b'x') * 40_000_000; files = [open(sys.executable) for _ in range(9)]"
    talk = hold + "\nimport threading; threading.Thread(target=time.sleep, args=(60,)).start()\nprint(1, flush=True)"
    taken = []
    for source in ("import sys; print(1, flush=True); sys.stdin.read()", talk):
        with subprocess.Popen([sys.executable, "-c", source], stdin=-1, stdout=-1) as process:
            assert process.stdout and process.stdout.readline()
            taken.append(sample_process("part", process.pid, 0.0))
            process.kill()
    before, after = taken
    assert before and after
    assert after.memory - before.memory > 35_000_000
    assert (after.descriptors - before.descriptors, after.threads - before.threads) == (9, 1)
    assert sample_process("part", process.pid, 0.0) is None


async def eventually(condition: Callable[[], Any], within_s: float = 30.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.01)


class FakeVictim:
    """Records what is done to it."""

    def __init__(self, name: str, tier: str | None):
        self.name, self.tier = name, tier
        self.done: list[str] = []

    def send(self, number: signal.Signals) -> None:
        self.done.append(number.name)

    def restart(self) -> None:
        self.done.append("restart")


async def test_faults_are_repaired_and_recorded() -> None:
    victims, usable = [FakeVictim("small-0", "small"), FakeVictim("redis", None)], False
    faults = FaultInjector(victims, lambda: usable, random.Random(4), every_s=0.001, longest_s=0.11)
    task = asyncio.create_task(faults.run())
    await eventually(lambda: faults.outages)
    assert faults.broken_tiers(time.monotonic(), time.monotonic()) == {"small"}
    await asyncio.sleep(0.5)
    now = time.monotonic()
    assert faults.broken_tiers(now, now) == {"small"}, "until every tier is usable again"
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    for victim in victims:
        pairs = list(zip(victim.done[::2], victim.done[1::2], strict=True))
        assert set(pairs) <= {("SIGKILL", "restart"), ("SIGSTOP", "SIGCONT")}
    assert sum(faults.counts.values()) == sum(len(victim.done) for victim in victims) / 2


async def until(seconds: float, *parts: Any, stopped: asyncio.Event | None = None) -> None:
    await run_until(parts, seconds, stopped or asyncio.Event())


async def test_run_ends_on_timeout_signal_or_end_of_a_part() -> None:
    cleaned_up: list[str] = []

    async def endless(name: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cleaned_up.append(name)

    async def broken() -> None:
        raise StackError("the oracle ended early")

    signalled = asyncio.Event()
    signalled.set()
    await until(0.05, endless("time"))
    await until(60.0, endless("signal"), stopped=signalled)
    await until(60.0, endless("end"), asyncio.sleep(0))
    with pytest.raises(StackError, match="ended early"):
        await until(60.0, endless("error"), broken())
    assert cleaned_up == ["time", "signal", "end", "error"]


def test_outage_overlaps() -> None:
    assert Outage("small", 10.0, 20.0).overlaps(19.0, 30.0)
    assert not Outage("small", 10.0, 20.0).overlaps(20.1, 30.0)
    assert Outage("small", 10.0).overlaps(500.0, 501.0)
    assert not Outage("small", 10.0).overlaps(8.0, 9.0)


def test_equal_seeds_give_equal_faults_and_requests() -> None:
    def all_of(seed: str) -> list[Any]:
        writer, rng = RequestWriter("birch", seed, 50, 8), random.Random(seed)
        document = writer.new_document()
        requests = [writer.request([writer.question()]) for _ in range(20)]
        return [document, requests, [plan(rng, ["a", "b"], 5.0) for _ in range(20)]]

    assert all_of("3") == all_of("3") != all_of("4")


def test_documents_contain_only_their_own_canary() -> None:
    writers = [RequestWriter(tenant, "5", 100, 8) for tenant in ("ashwood", "birch")]
    documents = [writer.new_document() for writer in writers for _ in range(30)]
    canaries = set().union(*(writer.canaries for writer in writers))
    assert len(canaries) == len(documents)
    for document in documents:
        assert [canary for canary in canaries if canary in document.text] == [document.canary]
    texts = [document.text.replace(document.canary, "") for document in documents]
    assert len(set(texts)) < len(texts), "some are twins"


def report_of(*exchanges: SoakExchange, minutes: float = 1.0, **changes: Any) -> SoakReport:
    tally = Tally(num_checked=1)
    for one in exchanges:
        tally.add(one, violations(one, (), CANARIES, REQUEST_S))
    faults = FaultInjector([], lambda: True, random.Random(0), 1.0, 1.0)
    return SoakReport("tiny", 7, minutes, tally, faults, **changes)


@pytest.mark.parametrize(
    ("report", "verdict"),
    [
        (report_of(answered(text="tabafegozi")), "1 answers with another document's canary"),
        (report_of(answered(ended_at=100.0), answered(ended_at=99.0)), "2 late answers"),
        (report_of(answered(request("small"))), "1 wrong answers"),
        (report_of(failed()), "1 errors without an excuse"),
        (report_of(samples=samples(per_s=1.0), minutes=5.0), "large-0 leaks descriptors: 3600.0 an hour, bound 60.0"),
        (report_of(troubles=["process 5 is left"]), "process 5 is left"),
    ],
)
def test_verdict_names_every_problem(report: SoakReport, verdict: str) -> None:
    assert verdict in report.verdict
    assert verdict in report.as_json()["verdict"]
    assert verdict in report.table()


def test_verdict_is_empty_without_problems() -> None:
    report = report_of(answered(), samples=samples(), minutes=5.0)
    assert report.verdict == []
    assert "nothing was wrong" in report.table()
    content = report.as_json()
    assert (content["requests"], content["wrong_answers"], content["errors"], content["faults"]) == (1, 0, 0, {})
    assert content["slopes"].keys() == {f"large-0 {measure}" for measure in MEASURES}
    assert [sample["at_s"] for sample in content["samples"]] == [9, 19, 29, *range(39, 300, 10)]


@pytest.mark.parametrize(
    "arguments", [[], ["--minutes", "0"], ["--minutes", "soon"], ["--minutes", "1", "--seed", "x"]]
)
def test_invalid_command_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        command.main(arguments)
    assert "kvrelay soak: error" in capsys.readouterr().err
