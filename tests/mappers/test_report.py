from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest

from mappers import Mapper
from mappers.diagnose import PartScore
from mappers.manifest import ArmScore, Evaluation, GreedyScore, LayerCosine, LengthScores
from mappers.report import EvaluatedBundle, chart, comparison, diagnosis_table, evaluation_table, page
from mappers.speed import Speed, flops_per_token, measure

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
def bundle(twin_mapper: Mapper) -> EvaluatedBundle:
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


def test_a_page_contains_everything_and_loads_nothing(bundle: EvaluatedBundle) -> None:
    html = page([bundle, bundle], ROWS)
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


def test_bundles_in_folders_of_the_same_name_are_distinguished(bundle: EvaluatedBundle) -> None:
    slower = replace(bundle, name="other/<mine>", speed=replace(SPEED, map_ms={2048: 80}))
    html = page([bundle, slower], ROWS)
    names = {f"{where}/&lt;mine&gt;" for where in ("bundles", "other")}
    for title in ("By prefix length", "Attention by layer", "Quality against time"):
        plot = html.partition(f"<h2>{title}</h2>")[2].partition("</svg>")[0]
        assert all(f">{name}</text>" in plot for name in names), title


def path_points(svg: str) -> list[list[tuple[float, float]]]:
    """The points of every line in an SVG."""
    paths = [path.get("d", "") for path in ElementTree.fromstring(svg).iter("path")]
    return [[(float(x), float(y)) for x, y in re.findall(r"[ML] (\S+) (\S+)", path)] for path in paths]


def test_distances_are_plotted_at_the_start_of_their_spans(bundle: EvaluatedBundle) -> None:
    svg = page([bundle], ROWS).partition("<h2>By distance</h2>")[2].partition("</svg>")[0].strip() + "</svg>"
    ((first, second),) = path_points(svg)
    assert first[0] < second[0] and first[1] == second[1]


def test_points_are_drawn_at_their_values() -> None:
    ((low, high, middle),) = path_points(chart({"a": [(0, 1.0), (10, 3.0), (5, 2.0)]}, "x", "y"))
    assert low[0] < middle[0] < high[0] and low[1] > middle[1] > high[1]
    assert middle[0] == pytest.approx((low[0] + high[0]) / 2) and middle[1] == pytest.approx((low[1] + high[1]) / 2)


def test_single_points_are_drawn_as_dots_and_equal_values_have_a_range() -> None:
    drawn = ElementTree.fromstring(chart({"a": [(1, 1)], "b": [(1, 1)]}, "x", "y"))
    centres = {(float(dot.get("cx", "")), float(dot.get("cy", ""))) for dot in drawn.iter("circle")}
    assert len(centres) == 1 and not list(drawn.iter("path"))
    assert {"a", "b", "x", "y"} <= {text.text for text in drawn.iter("text")}


@pytest.mark.parametrize("low, high", [(0.0, 10.0), (0.98, 1.21), (384.0, 2048.0)])
def test_axes_do_not_start_at_zero_and_cover_the_data(low: float, high: float) -> None:
    drawn = ElementTree.fromstring(chart({"a": [(low, low), (high, high)]}, "x", "y"))
    ticks = [float(text.text or "") for text in drawn.iter("text") if re.fullmatch(r"[-\d.,]+", text.text or "")]
    assert len(ticks) > 4 and low - 0.3 * (high - low) <= min(ticks) and max(ticks) <= high + 0.3 * (high - low)


def test_tables_show_what_was_measured(bundle: EvaluatedBundle) -> None:
    table = evaluation_table(EVALUATION)
    assert re.search(r"^hybrid 1024 +1\.0432  1\.010-1\.080 +0\.941   0\.0300   0\.2100 +7$", table, re.M)
    assert "cosine: mean 0.9900; lowest in layer 1: 0.9800" in table
    assert "greedy, 128 tokens: 0.812 of the tokens agree, 0.50 of 14 generations are identical" in table
    assert re.search(r"^what +keys +1\.0432", diagnosis_table(ROWS), re.M)
    (line,) = comparison([bundle]).splitlines()[1:]
    assert re.search(r"^bundles/<mine> +ridge +1\.0432 .* 0\.9900 .* 20\.0 +64%$", line)
