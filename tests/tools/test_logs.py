"""`kvrelay prefixes` and `kvrelay calibrate`, on logs with a known result."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

from gateway.policies import build
from tests.gateway.test_process import configured, workers
from tools.commands import calibrate, prefixes
from tools.logs import LogUnusable
from tools.logs.calibration import (
    Isotonic,
    LabelledAnswer,
    ThresholdEffect,
    halves,
    read_answers,
    threshold_for_agreement,
    threshold_for_escalations,
)
from tools.logs.traffic import mask
from workers.api.schemas import Rates

COMMANDS = {"calibrate": calibrate.main, "prefixes": prefixes.main}
RULES = "Answer from the handbook. " * 40
IMAGE = {"type": "image_url", "image_url": {"url": "https://example.org/1.png"}}
DEEP: dict[str, Any] = reduce(lambda inner, _: {"x": inner}, range(400), {})
RIGHT_FROM = -1.0  # in the planted log, answers surer than that are right


def written(folder: Path, lines: list[Any]) -> Path:
    path = folder / "log.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def chat(system: str, *turns: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    messages = [{"role": roles[index % 2], "content": turn} for index, turn in enumerate(turns)]
    return {"model": "auto", "messages": [{"role": "system", "content": system}, *messages]}


def reported(folder: Path, lines: list[Any], *more: str) -> dict[str, Any]:
    assert prefixes.main([str(written(folder, lines)), "--json", str(folder / "out.json"), *more]) == 0
    return dict(json.loads((folder / "out.json").read_text()))


def test_sharing_is_counted_in_characters(tmp_path: Path) -> None:
    third = {"request": chat(RULES, "One?", "Yes.", "And?")}
    lines = [chat(RULES, "One?"), chat(RULES, "Two?"), third, chat("Else", "x")]
    report = reported(tmp_path, lines, "--prefill-rate", "100")
    shared = 2 * len(RULES) + len("One?")
    assert (report["requests"], report["requests_with_a_hit"]) == (4, 2)
    assert report["hit_ratio"] == pytest.approx(shared / report["chars"])
    assert report["saved_prefill_s"] == pytest.approx(shared / 4 / 100)
    assert report["top"][0] | {"name": ""} == {"name": "", "uses": 3, "messages": 1, "chars": len(RULES)}
    assert [one["from_chars"] for one in report["by_length"]] == [0, 1000]


def test_other_tools_make_another_prefix(tmp_path: Path) -> None:
    assert reported(tmp_path, [chat(RULES, "One?"), chat(RULES, "Two?") | {"tools": [{"type": "x"}]}])["hit_ratio"] == 0


def test_prefix_breakers_are_reported_with_their_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [chat(f"Now: 2026-11-29T10:{minute:02}:00Z. {RULES}", f"{minute}?") for minute in range(10)]
    report = reported(tmp_path, lines)
    assert report["hit_ratio"] == 0
    assert report["hit_ratio_without_volatile"] > 0.85
    assert report["volatile"] == [{"kind": "timestamp", "role": "system", "position": 0, "at": 5, "prompts": 10}]
    result = capsys.readouterr().out
    assert "Move it behind what is shared" in result
    assert "handbook" not in result, "no text unless it is asked for"


def test_several_spans_of_a_prompt_count_once(tmp_path: Path) -> None:
    lines = [chat(f"From 2026-11-{day} to 2026-12-{day}, as of 2027-01-{day}. {RULES}", "?") for day in (10, 11, 12)]
    assert reported(tmp_path, lines)["volatile"] == [
        {"kind": "date", "role": "system", "position": 0, "at": 5, "prompts": 3}
    ]


def test_constant_spans_break_nothing(tmp_path: Path) -> None:
    """They are constant within each of two applications, and differ between them."""
    ours, theirs = f"Founded 1999-01-02, merged 2005-06-07. {RULES}", f"Opened 2001-02-03. {RULES} Be brief."
    assert reported(tmp_path, [chat(rules, f"{n}?") for rules in (ours, theirs) for n in (1, 2)])["volatile"] == []


async def test_prefill_rate_of_the_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the secret of the configuration, or else the one made by `kvrelay up`."""
    monkeypatch.setenv("KVRELAY_HOME", str(tmp_path / "home"))
    lines = [chat(RULES, "One?"), chat(RULES, "Two?")]
    with workers() as (small, _, section):
        config = str(configured(tmp_path, workers=section))
        small.rates = Rates(prefill_tokens_per_s=50.0)
        measured = await asyncio.to_thread(reported, tmp_path, lines, "--config", config)
        assert measured["prefill_rate"] == 50
        assert measured["saved_prefill_s"] == reported(tmp_path, lines, "--prefill-rate", "50")["saved_prefill_s"]
        (tmp_path / "home").mkdir()
        (tmp_path / "secret").rename(tmp_path / "home" / "secret")
        assert await asyncio.to_thread(reported, tmp_path, lines, "--config", config) == measured
        small.rates = Rates()
        nothing = await asyncio.to_thread(prefixes.main, [str(tmp_path / "log.jsonl"), "--config", config])
        assert nothing == 2
    assert "tier 'small' has measured its prefill rate (small-0: no prefill yet)" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--prefill-rate", "--chars-per-token"])
@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "1e-320", "fast"])
def test_invalid_rate(tmp_path: Path, option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        prefixes.main([str(tmp_path / "log"), option, value])
    assert f"argument {option}: {value!r}: must be a number from 0.001 to 1e9" in capsys.readouterr().err


def test_text_is_shown_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On one line, without control characters."""
    rules = f"\x1b[2J\n{RULES}"
    reported(tmp_path, [chat(rules, "One?"), chat(rules, "Two?")], "--show-text")
    assert " [2J Answer from the handbook." in capsys.readouterr().out


def test_spans_in_the_last_message_break_nothing(tmp_path: Path) -> None:
    report = reported(tmp_path, [chat(RULES, f"Where is order 10000000{n}?") for n in range(5)], "--prefill-rate", "9")
    assert (report["volatile"], report["hit_ratio_without_volatile"]) == ([], report["hit_ratio"])
    assert report["saved_prefill_s_without_volatile"] == report["saved_prefill_s"]


def test_top_lists_each_document_under_common_rules(tmp_path: Path) -> None:
    """A prefix that always has the same continuation is not listed."""
    documents = [f"Document {name}. " * 9 for name in "AB"]
    lines = [chat(RULES, document, "Read.", f"{n}?") for document in documents for n in range(3)]
    top = [(one["uses"], one["messages"]) for one in reported(tmp_path, lines)["top"]]
    assert top == [(6, 1), (3, 3), (3, 3)]


def test_repeated_texts_are_scanned_once(tmp_path: Path) -> None:
    before = mask.cache_info().misses
    reported(tmp_path, [chat(f"On 2026-11-{n % 2 + 10}. {RULES}", f"{n}?") for n in range(200)])
    assert mask.cache_info().misses - before < 10


@pytest.mark.parametrize("key", ["request", "body"])
def test_request_inside_another_object(tmp_path: Path, key: str) -> None:
    lines = [chat(RULES, "One?"), {"custom_id": "2", key: chat(RULES, "Two?"), "status": 200}]
    assert reported(tmp_path, lines)["requests_with_a_hit"] == 1


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("2026-11-29 10:00:01", "timestamp"),
        ("29.11.2026", "date"),
        ("10:31", "time"),
        ("6f9619ff-8b86-d011-b42d-00cf4fc964ff", "uuid"),
        ("bf9619ff-8b86-d011-b42d-00cf4fc964ff", "uuid"),
        ("9f86d081884c7d659a2f", "hex_id"),
        ("f86d081884c7d659a2f", "hex_id"),
        ("1764400000", "number"),
    ],
)
def test_volatile_spans(text: str, kind: str) -> None:
    assert mask(f"a {text} b") == f"a <{kind}> b"
    assert mask("Chapter 12 has 340 pages, facade and decade") == "Chapter 12 has 340 pages, facade and decade"


def test_isotonic_regression_is_monotonic_and_keeps_the_mean() -> None:
    answers = [LabelledAnswer(float(place), agrees) for place, agrees in enumerate([False, True, False, True, True])]
    fitted = Isotonic.fit(answers)
    assert (fitted.starts, fitted.values) == ((0.0, 1.0, 3.0), (0.0, 0.5, 1.0))
    assert [fitted(place) for place in (-9.0, 0.5, 1.0, 2.9, 3.0, 9.0)] == [0.0, 0.0, 0.5, 0.5, 1.0, 1.0]
    assert Isotonic.fit([LabelledAnswer(0.0, True), LabelledAnswer(1.0, False)]).values == (0.5,)


def planted(count: int = 400) -> list[dict[str, Any]]:
    """Three of four answers have a confidence above -1 and are right; half of the others are right by chance."""
    draw = random.Random(5)
    lines = []
    for _ in range(count):
        sure = draw.random() < 0.75
        confidence = draw.uniform(RIGHT_FROM, 0) if sure else draw.uniform(-3, RIGHT_FROM)
        lines.append({"confidence": confidence, "agrees": sure or draw.random() < 0.5})
    return lines


def calibrated(folder: Path, *goal: str) -> dict[str, Any]:
    path = written(folder, planted())
    assert calibrate.main([str(path), *goal, "--json", str(folder / "out.json")]) == 0
    return dict(json.loads((folder / "out.json").read_text()))


def test_maximum_of_escalations(tmp_path: Path) -> None:
    result = calibrated(tmp_path, "--max-escalations", "0.1")
    assert result["fit"]["escalations"] <= 0.1 < result["fit"]["escalations"] + 0.02
    assert result["held_out"]["escalations"] == pytest.approx(0.1, abs=0.06)
    assert result["held_out"]["relative_cost"] == pytest.approx(0.2 + result["held_out"]["escalations"])
    assert result["fit"]["answers"] + result["held_out"]["answers"] == 400


def test_minimum_of_agreement(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = calibrated(tmp_path, "--min-agreement", "0.99", "--plot", str(tmp_path / "plot.svg"))
    assert result["threshold"] == pytest.approx(RIGHT_FROM, abs=0.25), "where right and wrong answers separate"
    assert result["held_out"]["agreement"] >= 0.96
    assert result["held_out"]["escalations"] == pytest.approx(0.25, abs=0.1)
    assert suggested(capsys.readouterr().out) == result["threshold"]
    drawn = ElementTree.fromstring((tmp_path / "plot.svg").read_text())
    assert len([element for element in drawn if element.tag.endswith("polyline")]) == 3


def suggested(report: str) -> float:
    """Return the threshold of the report's last line, as a configuration would read it."""
    return float(yaml.safe_load(report.splitlines()[-1])["policy"]["threshold"])


@pytest.mark.parametrize("step", [1e-7, 1e-12])
@pytest.mark.parametrize("goal", ["--min-agreement", "--max-escalations"])
def test_threshold_is_printed_exactly(
    tmp_path: Path, goal: str, step: float, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rounded one would escalate too much, or accept wrong answers."""
    path = written(tmp_path, [{"confidence": -place * step, "agrees": place < 9} for place in range(1, 100)])
    assert calibrate.main([str(path), goal, "1", "--json", str(tmp_path / "out.json")]) == 0
    threshold = json.loads((tmp_path / "out.json").read_text())["threshold"]
    assert -10 * step < threshold < 0
    assert suggested(capsys.readouterr().out) == threshold


@pytest.mark.parametrize("size", [1.7e308, 5e-324])
def test_extreme_threshold_is_printed_in_few_digits(
    tmp_path: Path, size: float, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, [{"confidence": -size, "agrees": True}] * 40)
    assert calibrate.main([str(path), "--max-escalations", "0"]) == 0
    report = capsys.readouterr().out
    assert suggested(report) == -size and len(report.splitlines()[-1]) < 80


def test_goal_without_a_threshold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A threshold above 0 would reach it, but is not a log-probability."""
    path, plot = written(tmp_path, [{"confidence": 0.0, "agrees": False}] * 40), tmp_path / "plot.svg"
    files = ["--json", str(tmp_path / "out.json"), "--plot", str(plot)]
    assert calibrate.main([str(path), "--min-agreement", "0.5", *files]) == 0
    result, report = json.loads((tmp_path / "out.json").read_text()), capsys.readouterr().out
    assert (result["threshold"], result["held_out"]["escalations"]) == (None, 1.0)
    assert "No threshold gives that agreement" in report
    assert yaml.safe_load(report.splitlines()[-1]) == {"policy": {"name": "always_escalate"}}
    assert plot.read_text().count("<polyline") == 2


def test_goal_missed_on_the_held_out_half_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit, _ = halves([LabelledAnswer(-place, True) for place in range(100)])
    lines = [{"confidence": -place, "agrees": LabelledAnswer(-place, True) in fit} for place in range(100)]
    files = ["--json", str(tmp_path / "out.json")]
    assert calibrate.main([str(written(tmp_path, lines)), "--min-agreement", "0.9", *files]) == 0
    goal = json.loads((tmp_path / "out.json").read_text())["goal"]
    assert goal == {"of": "agreement", "share": 0.9, "met": False}
    assert "not the 0.9 asked for" in capsys.readouterr().out


def test_policy_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Another policy has other scores, and its settings are part of the result."""
    path = str(written(tmp_path, [{"confidence": place / 100, "agrees": True} for place in range(100)]))
    assert calibrate.main([path, "--max-escalations", "0.5"]) == 2
    assert "was scored by another policy than {name: confidence}" in capsys.readouterr().err
    margin = {"name": "confidence", "score": "margin", "streaming": "buffer"}
    assert calibrate.main([path, "--max-escalations", "0.5", "--policy", json.dumps(margin)]) == 0
    policy = yaml.safe_load(capsys.readouterr().out.splitlines()[-1])["policy"]
    assert build(policy) == build(margin | {"threshold": policy["threshold"]}) and policy["threshold"] > 0


@pytest.mark.parametrize("policy", ["fixed", "{name: fixed, tier: large}", "{name: verifier, score: mean}", "{"])
def test_policy_without_a_threshold(tmp_path: Path, policy: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        calibrate.main([str(tmp_path / "log"), "--min-agreement", "1", "--policy", policy])
    assert f"argument --policy: {policy!r}: " in capsys.readouterr().err


@pytest.mark.parametrize(
    "packed",
    [gzip.compress, lambda plain: b"\xef\xbb\xbf" + plain, lambda plain: plain.replace(b"\n", b"\r\n")],
    ids=["gzip", "byte order mark", "CRLF"],
)
def test_log_formats_of_other_programs(tmp_path: Path, packed: Callable[[bytes], bytes]) -> None:
    path = written(tmp_path, planted())
    as_it_was = read_answers(path)
    path.write_bytes(packed(path.read_bytes()))
    assert read_answers(path) == as_it_was


def test_truncated_gzip_log(tmp_path: Path) -> None:
    path = tmp_path / "log.gz"
    path.write_bytes(gzip.compress(written(tmp_path, planted()).read_bytes())[:-900])
    with pytest.raises(LogUnusable, match=r"cannot read .*log\.gz: Compressed file ended"):
        read_answers(path)


@pytest.mark.parametrize("command", ["calibrate", "prefixes"])
def test_output_file_must_not_be_the_log(tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, planted())
    plain, goal = path.read_bytes(), ["--min-agreement", "1"] if command == "calibrate" else []
    with pytest.raises(SystemExit):
        COMMANDS[command]([str(path), *goal, "--json", f"{tmp_path}/../{tmp_path.name}/log.jsonl"])
    assert "is named twice" in capsys.readouterr().err
    assert path.read_bytes() == plain


class CountingFloat(float):
    """A confidence that counts the comparisons with thresholds."""

    num = 0

    def __ge__(self, other: float) -> bool:
        CountingFloat.num += 1
        return float.__ge__(self, other)


@pytest.mark.parametrize(
    ("find", "share", "threshold"), [(threshold_for_escalations, 0.25, 512.0), (threshold_for_agreement, 0.75, 1024.0)]
)
def test_threshold_search_is_not_quadratic(
    find: Callable[[list[LabelledAnswer], float], float], share: float, threshold: float
) -> None:
    """Every other answer from 1024 on agrees."""
    answers = [LabelledAnswer(CountingFloat(place), place >= 1024 and place % 2 == 1) for place in range(2048)]
    CountingFloat.num = 0
    assert find(answers, share) == threshold
    assert 0 < CountingFloat.num <= 12 * len(answers)


def test_limits_of_both_goals() -> None:
    answers = [LabelledAnswer(-0.5, True), LabelledAnswer(-1.0, False), LabelledAnswer(-2.0, False)]
    assert threshold_for_escalations(answers, 0.0) == -2.0
    assert threshold_for_escalations(answers, 1.0) == -0.5
    assert threshold_for_agreement(answers, 0.0) == -2.0
    everything = threshold_for_agreement([LabelledAnswer(-0.5, False)], 1.0)
    assert everything > -0.5
    assert ThresholdEffect.of([LabelledAnswer(-0.5, False)], everything) == ThresholdEffect(1.0, 1.0, None)


@pytest.mark.parametrize(
    ("command", "lines", "message"),
    [
        ("prefixes", ["{broken"], "log.jsonl:1 is not JSON"),
        ("prefixes", ["[1]"], "log.jsonl:1 is a JSON list; expected an object"),
        ("prefixes", [], "holds no request"),
        ("prefixes", [chat("a", "b"), {"prompt": "x"}], 'log.jsonl:2 needs "messages"'),
        ("prefixes", [{"messages": [{"role": "robot", "content": "x"}]}], "log.jsonl:1: messages.0.role: "),
        ("prefixes", [{"messages": "hi"}], "log.jsonl:1: messages: Input should be a valid list"),
        ("prefixes", [chat("a", "b") | {"tools": "all"}], "log.jsonl:1: tools: Input should be a valid list"),
        ("prefixes", [{"messages": [{"role": "user", "content": [IMAGE]}]}], ".type: Input should be 'text'"),
        ("prefixes", [chat("a", "b") | {"tools": [DEEP]}], "log.jsonl:1 is nested too deep"),
        ("calibrate", [{"confidence": -1.0, "agrees": True}] * 3, "holds 3 answers; at least 20 are needed"),
        ("calibrate", [{"confidence": -1.0}] * 30, 'log.jsonl:1 needs "confidence": a number and "agrees"'),
    ],
)
def test_unusable_log(
    tmp_path: Path, command: str, lines: list[Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(written(tmp_path, lines))
    assert COMMANDS[command]([path, *(["--min-agreement", "0.9"] if command == "calibrate" else [])]) == 2
    assert message in capsys.readouterr().err


def test_missing_log_and_invalid_goal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert prefixes.main([str(tmp_path / "nowhere")]) == 2
    assert "cannot read" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        calibrate.main([str(tmp_path / "log"), "--min-agreement", "95"])
    assert "'95': must be a number from 0 to 1" in capsys.readouterr().err
