from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest

from mappers import Mapper
from mappers.diagnose import PartScore
from mappers.manifest import ArmScore, Evaluation, GreedyScore, LayerCosine, LengthScores
from mappers.plot import lines, points, ticks
from mappers.report import EvaluatedBundle, page
from mappers.speed import Speed, flops_per_token, measure
from mappers.tables import comparison, diagnosis_table, evaluation_table

SCORE = ArmScore(
    arm="hybrid", ppl_ratio=1.0432, ppl_low=1.01, ppl_high=1.08, top1=0.941, kl_mean=0.03, kl_p95=0.21, documents=7
)
EVALUATION = Evaluation(
    data="talks <of> people",
    head=4,
    tail=64,
    scored=128,
    tokens=2688,
    arms=(SCORE,),
    lengths=tuple(LengthScores(length=n, num_documents=7, arms=(SCORE,)) for n in (384, 1024)),
    attention=(LayerCosine(layer=0, mean=1, min=1), LayerCosine(layer=1, mean=0.98, min=0.91)),
    greedy=GreedyScore(tokens=128, generations=14, agreement=0.8125, identical=0.5),
)
SPEED = Speed(threads=1, peak_gflops=100, flops_per_token=10**6, map_ms={512: 11, 2048: 40}, best_ms={512: 9, 2048: 32})
ROWS = [PartScore("what", "keys", SCORE), PartScore("distance", "0-64", SCORE), PartScore("distance", "64-256", SCORE)]


@pytest.fixture
def judged(twin_mapper: Mapper) -> EvaluatedBundle:
    return EvaluatedBundle("bundles/<mine>", twin_mapper, EVALUATION, SPEED)


def test_speed_is_derived_from_the_longest_length() -> None:
    assert SPEED.ms_per_1024 == 20
    assert SPEED.share_of_peak == pytest.approx(1e6 * 2048 / 0.032 / 1e11)
    assert SPEED.as_json()["map"] == [
        {"tokens": 512, "ms": 11, "best_ms": 9},
        {"tokens": 2048, "ms": 40, "best_ms": 32},
    ]


def test_a_map_is_timed_at_each_length(sibling_mapper: Mapper) -> None:
    speed = measure(sibling_mapper, lengths=(64, 700), repeats=2)
    assert list(speed.map_ms) == [64, 700] and min(speed.map_ms.values()) > 0
    assert speed.peak_gflops > 0 and speed.threads == 1


def test_flops_count_two_operations_per_weight(sibling_mapper: Mapper) -> None:
    """Two fitted layers of width 16, keys and values each from some source layers of width 16; copies are free."""
    specs = sibling_mapper.manifest.layers[2:]
    blocks = sum(
        len(spec.of(kind).key_layers + spec.of(kind).value_layers) for spec in specs for kind in ("keys", "values")
    )
    assert flops_per_token(sibling_mapper) == 2 * blocks * 16 * 16


def test_a_page_contains_everything_and_loads_nothing(judged: EvaluatedBundle) -> None:
    html = page([judged, judged], ROWS)
    assert not re.search(r"(src|href|srcset)=|url\(|@import|<script|https?://", html)
    for figure in ("1.0432", "1.010 to 1.080", "0.941", "81.2%", "talks &lt;of&gt; people", "what keys", "20.0"):
        assert figure in html
    titles = ["By prefix length", "Attention by layer", "By distance", "Quality against time", "Where the error lies"]
    assert all(f"<h2>{title}</h2>" in html for title in titles)
    plots = re.findall(r"<svg.*?</svg>", html)
    assert len(plots) == 4 and "<mine>" not in html
    for plot in plots:
        ElementTree.fromstring(plot)


def test_a_page_omits_what_was_not_measured(twin_mapper: Mapper) -> None:
    bare = EVALUATION.model_copy(update={"attention": (), "greedy": None})
    html = page([EvaluatedBundle("b", twin_mapper, bare)])
    assert "its worst head" not in html and "its worst head" in page([EvaluatedBundle("b", twin_mapper, EVALUATION)])
    assert html.count("<svg") == 1 and "Attention" not in html and "time" not in html


def test_bundles_in_folders_of_the_same_name_are_distinguished(judged: EvaluatedBundle) -> None:
    slower = replace(judged, name="other/<mine>", speed=replace(SPEED, map_ms={2048: 80}))
    html = page([judged, slower], ROWS)
    names = {f"{where}/&lt;mine&gt;" for where in ("bundles", "other")}
    for title in ("By prefix length", "Attention by layer", "Quality against time"):
        plot = html.partition(f"<h2>{title}</h2>")[2].partition("</svg>")[0]
        assert all(f">{name}</text>" in plot for name in names), title


def test_distances_are_plotted_where_their_spans_begin(judged: EvaluatedBundle) -> None:
    plot = page([judged], ROWS).partition("<h2>By distance</h2>")[2].partition("</svg>")[0]
    assert len({x for x, _ in re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"', plot)}) == 2


def test_points_stand_where_their_values_are() -> None:
    drawn = ElementTree.fromstring(lines({"a": [(0, 1.0), (10, 3.0), (5, 2.0)]}, "x", "y"))
    low, high, middle = [(float(c.get("cx", "")), float(c.get("cy", ""))) for c in drawn.iter("circle")]
    assert low[0] < middle[0] < high[0] and low[1] > middle[1] > high[1]
    assert middle[0] == pytest.approx((low[0] + high[0]) / 2) and middle[1] == pytest.approx((low[1] + high[1]) / 2)
    assert len(list(drawn.iter("polyline"))) == 1
    assert not list(ElementTree.fromstring(points({"a": [(1, 1)], "b": [(1, 1)]}, "x", "y")).iter("polyline"))


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 10, [0, 2, 4, 6, 8, 10]),
        (0.98, 1.21, [0.95, 1.0, 1.05, 1.1, 1.15, 1.2, 1.25]),
        (384, 2048, [0, 500, 1000, 1500, 2000, 2500]),
    ],
)
def test_ticks_are_round_and_cover_the_range(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(expected)


def test_tables_show_what_was_measured(judged: EvaluatedBundle) -> None:
    table = evaluation_table(EVALUATION)
    assert re.search(r"^hybrid 1024 +1\.0432  1\.010-1\.080 +0\.941   0\.0300   0\.2100 +7$", table, re.M)
    assert "cosine: mean 0.9900; lowest in layer 1: 0.9800" in table
    assert "greedy, 128 tokens: 0.812 of the tokens agree, 0.50 of 14 generations are identical" in table
    assert re.search(r"^what +keys +1\.0432", diagnosis_table(ROWS), re.M)
    (line,) = comparison([judged]).splitlines()[1:]
    assert re.search(r"^bundles/<mine> +ridge +1\.0432 .* 0\.9900 .* 20\.0 +64%$", line)
