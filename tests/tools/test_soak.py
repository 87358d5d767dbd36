"""The soak's checks: each kind of thing that may be wrong is found, and what is well is left alone."""

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
from tools.soak.client import Exchange
from tools.soak.faults import Faults, Span, plan
from tools.soak.judge import FRESH_TOKENS, SLACK_S, judge
from tools.soak.load import Seen
from tools.soak.report import Report
from tools.soak.run import until_time_is_up
from tools.soak.samples import BOUNDS, MEASURES, Sample, look_at, slopes
from tools.soak.talks import Ask, Writer
from tools.stack import StackError

REQUEST_S = 30.0
CANARIES = {"kumonasovi", "tabafegozi"}
PROMPT = [{"role": "system", "content": "The password is kumonasovi."}, {"role": "user", "content": "What is it?"}]
MAPPED = {"tier": "large", "path": "mapped", "mapped_tokens": 200, "handoff_tokens": 204}
OVERLOADED = {"type": "overloaded", "code": "no_usable_worker", "message": "none is usable"}
WAIT = {"retry-after": "2"}


def ask(model: str = "auto", *, stream: bool = False, refused_with: tuple[int, ...] = (), **options: Any) -> Ask:
    body = {"model": model, "messages": PROMPT, "max_tokens": 4, "stream": stream, "kvrelay": options}
    return Ask(body, refused_with=refused_with)


def answered(asked: Ask | None = None, **changes: Any) -> Exchange:
    """A right answer, in time."""
    told = {"tier": "large", "path": "prefill", "mapped_tokens": 0, "cached_tokens": 0}
    whole = Exchange("ashwood", asked or ask(), 0.0, ended_at=1.0, ended="whole", status=200, told=told)
    return replace(whole, **changes)


def failed(asked: Ask | None = None, status: int = 503, error: Any = OVERLOADED, **changes: Any) -> Exchange:
    return answered(asked, ended="error", status=status, error=error, headers=WAIT, told={}, **changes)


@pytest.mark.parametrize(
    ("kind", "exchange"),
    [
        ("leak_of_text", answered(text="It is Tabafegozi.")),
        ("leak_of_text", answered(ended="hung_up", text="tabafegozi")),
        ("late", answered(ended_at=REQUEST_S + SLACK_S + 0.1)),
        ("late", failed(ask(refused_with=(400,)), 400, ended_at=REQUEST_S + SLACK_S + 0.1)),
        ("error", answered(ended="cut", status=None)),
        ("error", failed()),
        ("error", failed(error={"type": "internal_error", "code": "internal_error", "message": "a bug"}, status=500)),
        ("error", failed(ask(refused_with=(400,)), 404)),
        ("error", answered(ask(refused_with=(400,)))),
        ("wrong_answer", answered(ask("large"), told=MAPPED)),
        ("wrong_answer", answered(ask(exact=True), told=MAPPED)),
        ("wrong_answer", answered(ask(no_cache=True), told=MAPPED)),
        ("wrong_answer", answered(told=MAPPED | {"path": "exact"})),
        ("wrong_answer", answered(told=MAPPED | {"mapped_tokens": 0})),
        ("wrong_answer", answered(ask("small"))),
        ("wrong_answer", answered(told={})),
        ("wrong_answer", answered(is_fresh=True, told=MAPPED | {"handoff_tokens": None})),
        ("wrong_answer", answered(is_fresh=True, told={"path": "exact", "cached_tokens": FRESH_TOKENS + 1})),
    ],
)
def test_what_is_wrong_is_found(kind: str, exchange: Exchange) -> None:
    assert [finding.kind for finding in judge(exchange, (), CANARIES, REQUEST_S)] == [kind]


@pytest.mark.parametrize(
    "exchange",
    [
        answered(),
        answered(text="It is kumonasovi.", told=MAPPED, is_fresh=True),
        answered(ask("large")),
        answered(ended_at=REQUEST_S, told={"path": "exact", "cached_tokens": 500}),
        answered(ended="hung_up", status=None),
        failed(ask(refused_with=(400, 413)), 413),
    ],
)
def test_what_is_well_is_left_alone(exchange: Exchange) -> None:
    assert judge(exchange, (), CANARIES, REQUEST_S) == []


@pytest.mark.parametrize(
    ("exchange", "broken", "is_excused"),
    [
        (failed(ask("large")), {"large"}, True),
        (failed(ask("large")), {"small"}, False),
        (failed(ask(refused_with=(400,))), {"large"}, True),
        (failed(ask()), {"large"}, False),
        (failed(ask()), {"small", "large"}, True),
        (failed(ask(stream=True), status=200), {"small"}, True),
        (failed(ask(), error=OVERLOADED | {"type": "internal_error"}), {"small", "large"}, False),
        (failed(ask("large"), error=OVERLOADED | {"code": None}), {"large"}, False),
        (replace(failed(ask("large")), headers={}), {"large"}, False),
        (answered(ask("large"), ended="cut"), {"small", "large"}, False),
        (answered(ask("large"), text="tabafegozi"), {"small", "large"}, False),
    ],
)
def test_an_error_is_excused_by_what_was_broken(exchange: Exchange, broken: set[str], is_excused: bool) -> None:
    assert (not judge(exchange, broken, CANARIES, REQUEST_S)) == is_excused


def samples(
    life: int = 0, *, num: int = 300, level: float = 1e6, per_s: float = 0.0, spread: float = 0.0
) -> list[Sample]:
    """One process looked at once a second, all its measures alike."""
    rng = random.Random(life)
    values = [int(level + per_s * second + rng.uniform(-spread, spread)) for second in range(num)]
    return [
        Sample("large-0", life, 1000.0 * life + second, value, value, value, value, value)
        for second, value in enumerate(values)
    ]


@pytest.mark.parametrize("measure", MEASURES)
def test_a_leak_is_found(measure: str) -> None:
    leaking = samples(per_s=10 * BOUNDS[measure] / 3600, spread=BOUNDS[measure] / 100, level=0)
    assert [one.is_leak for one in slopes(leaking, 300) if one.measure == measure] == [True]


@pytest.mark.parametrize("measure", MEASURES)
def test_what_goes_up_and_down_is_no_leak(measure: str) -> None:
    noisy = samples(spread=BOUNDS[measure] / 100, level=BOUNDS[measure])
    assert [one.is_leak for one in slopes(noisy, 300) if one.measure == measure] == [False]


def test_a_slope_is_of_lives_each_on_its_own_level_and_warm() -> None:
    filling = [replace(one, memory=10**9 * int(one.at_s)) for one in samples(num=60)]
    starting = [replace(one, memory=10**9 * int(one.at_s), tasks=None) for one in samples(3, num=90)]
    lives = [*filling, *starting, *(one for life in (1, 2) for one in samples(life, level=life * 1e8, per_s=5.0))]
    memory = slopes(lives, 180)[0]
    assert (memory.measure, memory.per_minute) == ("memory", pytest.approx(300))


def test_a_slope_needs_something_to_go_by() -> None:
    assert slopes(samples(num=9), 9.0) == []


def test_a_real_process_is_looked_at() -> None:
    hold = "import sys, time; kept = bytearray(b'x') * 40_000_000; files = [open(sys.executable) for _ in range(9)]"
    talk = hold + "\nimport threading; threading.Thread(target=time.sleep, args=(60,)).start()\nprint(1, flush=True)"
    looks = []
    for source in ("import sys; print(1, flush=True); sys.stdin.read()", talk):
        with subprocess.Popen([sys.executable, "-c", source], stdin=-1, stdout=-1) as process:
            assert process.stdout and process.stdout.readline()
            looks.append(look_at("part", process.pid, 0.0))
            process.kill()
    before, after = looks
    assert before and after
    assert after.memory - before.memory > 35_000_000
    assert (after.descriptors - before.descriptors, after.threads - before.threads) == (9, 1)
    assert look_at("part", process.pid, 0.0) is None


async def eventually(condition: Callable[[], Any], within_s: float = 30.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.01)


class Fake:
    """A victim that notes what is done to it."""

    def __init__(self, name: str, tier: str | None):
        self.name, self.tier = name, tier
        self.done: list[str] = []

    def send(self, number: signal.Signals) -> None:
        self.done.append(number.name)

    def restart(self) -> None:
        self.done.append("restart")


async def test_what_is_broken_is_mended_and_remembered() -> None:
    victims, whole = [Fake("small-0", "small"), Fake("redis", None)], False
    faults = Faults(victims, lambda: whole, random.Random(4), every_s=0.001, longest_s=0.11)
    task = asyncio.create_task(faults.run())
    await eventually(lambda: faults.spans)
    assert faults.broken_tiers(time.monotonic(), time.monotonic()) == {"small"}
    await asyncio.sleep(0.5)
    now = time.monotonic()
    assert faults.broken_tiers(now, now) == {"small"}, "until all is whole again"
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    for victim in victims:
        pairs = list(zip(victim.done[::2], victim.done[1::2], strict=True))
        assert set(pairs) <= {("SIGKILL", "restart"), ("SIGSTOP", "SIGCONT")}
    assert sum(faults.counts.values()) == sum(len(victim.done) for victim in victims) / 2


async def until(seconds: float, *parts: Any, stopped: asyncio.Event | None = None) -> None:
    await until_time_is_up(parts, seconds, stopped or asyncio.Event())


async def test_a_run_ends_when_its_time_is_up_or_a_signal_came_or_a_part_ended() -> None:
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


def test_a_span_touches_what_it_overlaps() -> None:
    assert Span("small", 10.0, 20.0).touches(19.0, 30.0)
    assert not Span("small", 10.0, 20.0).touches(20.1, 30.0)
    assert Span("small", 10.0).touches(500.0, 501.0)
    assert not Span("small", 10.0).touches(8.0, 9.0)


def test_the_same_seed_strikes_and_asks_the_same() -> None:
    def all_of(seed: str) -> list[Any]:
        writer, rng = Writer("birch", seed, 50, 8), random.Random(seed)
        document = writer.new_document()
        asks = [writer.ask([writer.question()]) for _ in range(20)]
        return [document, asks, [plan(rng, ["a", "b"], 5.0) for _ in range(20)]]

    assert all_of("3") == all_of("3") != all_of("4")


def test_documents_hold_their_own_canary_and_no_other() -> None:
    writers = [Writer(tenant, "5", 100, 8) for tenant in ("ashwood", "birch")]
    documents = [writer.new_document() for writer in writers for _ in range(30)]
    canaries = set().union(*(writer.canaries for writer in writers))
    assert len(canaries) == len(documents)
    for document in documents:
        assert [canary for canary in canaries if canary in document.text] == [document.canary]
    texts = [document.text.replace(document.canary, "") for document in documents]
    assert len(set(texts)) < len(texts), "some are twins"


def report_of(*exchanges: Exchange, minutes: float = 1.0, **changes: Any) -> Report:
    seen = Seen(num_checked=1)
    for one in exchanges:
        seen.note(one, judge(one, (), CANARIES, REQUEST_S))
    faults = Faults([], lambda: True, random.Random(0), 1.0, 1.0)
    return Report("tiny", 7, minutes, seen, faults, **changes)


@pytest.mark.parametrize(
    ("report", "verdict"),
    [
        (report_of(answered(text="tabafegozi")), "1 answers with another document's canary"),
        (report_of(answered(ended_at=100.0), answered(ended_at=99.0)), "2 late answers"),
        (report_of(answered(ask("small"))), "1 wrong answers"),
        (report_of(failed()), "1 errors that nothing excuses"),
        (report_of(samples=samples(per_s=1.0), minutes=5.0), "large-0 leaks descriptors: 3600.0 an hour, bound 60.0"),
        (report_of(troubles=["process 5 is left"]), "process 5 is left"),
    ],
)
def test_the_verdict_names_what_was_wrong(report: Report, verdict: str) -> None:
    assert verdict in report.wrong
    assert verdict in report.as_json()["verdict"]
    assert verdict in report.table()


def test_nothing_was_wrong() -> None:
    report = report_of(answered(), samples=samples(), minutes=5.0)
    assert report.wrong == []
    assert "nothing was wrong" in report.table()
    told = report.as_json()
    assert (told["requests"], told["wrong_answers"], told["errors"], told["faults"]) == (1, 0, 0, {})
    assert told["slopes"].keys() == {f"large-0 {measure}" for measure in MEASURES}
    assert [sample["at_s"] for sample in told["samples"]] == [9, 19, 29, *range(39, 300, 10)]


@pytest.mark.parametrize(
    "arguments", [[], ["--minutes", "0"], ["--minutes", "soon"], ["--minutes", "1", "--seed", "x"]]
)
def test_a_command_line_that_is_none(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        command.main(arguments)
    assert "kvrelay soak: error" in capsys.readouterr().err
