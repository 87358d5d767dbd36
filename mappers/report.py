"""Reports an evaluation: text tables for the terminal, and one self-contained HTML page (`report.html.jinja`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import leather

from mappers.diagnose import PartScore
from mappers.manifest import ArmScore, Evaluation
from mappers.mapper import Mapper
from mappers.protocol import SPANS
from mappers.speed import Speed

TEMPLATE = Path(__file__).with_name("report.html.jinja")
FIGURES = f"{'ppl ratio':>10}  {'95% interval':<16}{'top-1':>7}{'KL mean':>9}{'KL p95':>9}{'documents':>11}"
CHART_WIDTH, CHART_HEIGHT = 640, 320
COLOURS = ("#2166ac", "#b2182b", "#1b7837", "#762a83", "#e08214", "#35978f", "#7f7f7f")

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class EvaluatedBundle:
    """One bundle with its measurements. `name` is as the user gave it, so that names differ."""

    name: str
    mapper: Mapper
    evaluation: Evaluation
    speed: Speed | None = None

    @property
    def hybrid(self) -> ArmScore | None:
        return self.evaluation.arm("hybrid")

    @property
    def cosine(self) -> float | None:
        """Cosine of attention outputs, mean over layers."""
        layers = self.evaluation.attention
        return sum(layer.mean for layer in layers) / len(layers) if layers else None

    def as_json(self) -> dict[str, Any]:
        values = {"bundle": self.mapper.bundle_id, **self.evaluation.model_dump(mode="json")}
        values |= {"method": self.mapper.manifest.method, "weight_bytes": self.mapper.weight_bytes}
        return values | ({"speed": self.speed.as_json()} if self.speed else {})


def diagnosis_json(rows: Sequence[PartScore]) -> list[dict[str, Any]]:
    return [{"by": row.by, "part": row.part, **row.score.model_dump(mode="json")} for row in rows]


# The HTML page.


def page(bundles: Sequence[EvaluatedBundle], diagnosis: Sequence[PartScore] = ()) -> str:
    """Render the report of one or more bundles; `diagnosis` is that of the first. Nothing is loaded by the page."""
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    return template.render(bundles=bundles, diagnosis=diagnosis, charts=_charts(bundles, diagnosis))


def _charts(bundles: Sequence[EvaluatedBundle], diagnosis: Sequence[PartScore]) -> list[tuple[str, str]]:
    """Return the title and SVG of every chart with data."""
    layers: dict[str, Points] = {
        each.name: [(row.layer, row.mean) for row in each.evaluation.attention] for each in bundles
    }
    if len(bundles) == 1:
        layers["its worst head"] = [(row.layer, row.min) for row in bundles[0].evaluation.attention]
    lengths: dict[str, Points] = {
        each.name: [
            (at.length, score.ppl_ratio) for at in each.evaluation.lengths for score in at.arms if score.arm == "hybrid"
        ]
        for each in bundles
    }
    distances: dict[str, Points] = {
        each.name: [(SPANS[row.distance][0], row.mean) for row in each.evaluation.by_distance] for each in bundles
    }
    losses = [(SPANS[row.part][0], row.score.ppl_ratio) for row in diagnosis if row.by == "distance"]
    times: dict[str, Points] = {
        each.name: [(each.speed.ms_per_1024, each.hybrid.ppl_ratio)] for each in bundles if each.speed and each.hybrid
    }
    ratio, cosine, distance = "ppl ratio, hybrid", "cosine of outputs", "tokens before the native tail"
    charts: list[tuple[str, dict[str, Points], str, str]] = [
        ("By prefix length", lengths, "tokens of prefix", ratio),
        ("Attention by layer", layers, "target layer", cosine),
        ("Attention by distance", distances, distance, cosine),
        ("By distance", {"mapped alone": losses}, distance, "ppl ratio"),
        ("Quality against time", times, "ms of map per 1,024 tokens", ratio),
    ]
    return [(title, chart(series, x, y)) for title, series, x, y in charts if any(series.values())]


def chart(series: Mapping[str, Points], x_name: str, y_name: str) -> str:
    """Draw each series as a line, or as a dot if it has one point; inline SVG."""
    drawing = leather.Chart()
    drawing.add_x_axis(name=x_name)
    drawing.add_y_axis(name=y_name)
    present = {name: points for name, points in series.items() if points}
    for index, (name, points) in enumerate(present.items()):
        colour = COLOURS[index % len(COLOURS)]
        if len(points) > 1:
            drawing.add_line(points, name=name, stroke_color=colour)
        else:
            drawing.add_dots(points, name=name, fill_color=colour, radius=4)
    drawing.add_x_scale(*_domain([x for points in present.values() for x, _ in points]))
    drawing.add_y_scale(*_domain([y for points in present.values() for _, y in points]))
    svg = str(drawing.to_svg(width=CHART_WIDTH, height=CHART_HEIGHT))
    return svg.replace(' xmlns="http://www.w3.org/2000/svg"', "")  # HTML needs no namespace for inline SVG


def _domain(values: Sequence[float]) -> tuple[float, float]:
    """Return the range of an axis, with a margin if all values are equal."""
    low, high = min(values), max(values)
    margin = 0.1 * abs(high) or 1.0
    return (low - margin, high + margin) if high - low < 1e-9 * max(1.0, abs(high)) else (low, high)


# Text tables.


def evaluation_table(evaluation: Evaluation) -> str:
    """List every arm over all prefix lengths, the served one at each length, then other measurements."""
    lines = [f"{'arm':<16}{FIGURES}"]
    lines += [_row(f"{score.arm:<16}", score) for score in evaluation.arms]
    for at in evaluation.lengths:
        lines += [_row(f"{f'hybrid {at.length}':<16}", score) for score in at.arms if score.arm == "hybrid"]
    if evaluation.attention:
        worst = min(evaluation.attention, key=lambda layer: layer.mean)
        mean = sum(layer.mean for layer in evaluation.attention) / len(evaluation.attention)
        lines.append(f"attention output, cosine: mean {mean:.4f}; lowest in layer {worst.layer}: {worst.mean:.4f}")
    if evaluation.by_distance:
        cosines = ", ".join(f"{row.distance} {row.mean:.4f}" for row in evaluation.by_distance)
        lines.append(f"by distance before the native tail: {cosines}")
    if greedy := evaluation.greedy:
        lines.append(
            f"greedy, {greedy.tokens} tokens: {greedy.agreement:.3f} of the tokens agree, {greedy.identical:.2f} of "
            f"{greedy.generations} generations are identical"
        )
    return "\n".join(lines)


def diagnosis_table(rows: Sequence[PartScore]) -> str:
    """List the loss from mapping each part alone."""
    lines = [f"{'mapped alone':<24}{FIGURES}"]
    lines += [_row(f"{row.by:<10}{row.part:<14}", row.score) for row in rows]
    return "\n".join(lines)


def comparison(bundles: Sequence[EvaluatedBundle]) -> str:
    """List one line per bundle: quality as served, size, time of the map and its share of the processor's peak."""
    width = max(len(each.name) for each in bundles) + 2
    lines = [
        f"{'bundle':<{width}}{'method':<12}{'hybrid':>8}  {'95% interval':<15}{'top-1':>6}{'KL p95':>8}"
        f"{'mapped':>8}{'cosine':>8}{'MB':>8}{'ms/1024':>9}{'of peak':>9}"
    ]
    for each in bundles:
        hybrid, mapped = each.hybrid, each.evaluation.arm("mapped")
        cells = [f"{each.name:<{width}}{each.mapper.manifest.method:<12}"]
        if hybrid:
            interval = f"{hybrid.ppl_low:.3f}-{hybrid.ppl_high:.3f}"
            cells.append(f"{hybrid.ppl_ratio:>8.4f}  {interval:<15}{hybrid.top1:>6.3f}{hybrid.kl_p95:>8.3f}")
        else:
            cells.append(f"{'-':>8}  {'-':<15}{'-':>6}{'-':>8}")
        cells.append(f"{mapped.ppl_ratio:>8.4f}" if mapped else f"{'-':>8}")
        cells.append(f"{each.cosine:>8.4f}" if each.cosine is not None else f"{'-':>8}")
        cells.append(f"{each.mapper.weight_bytes / 1e6:>8.2f}")
        if each.speed:
            cells.append(f"{each.speed.ms_per_1024:>9.1f}{each.speed.share_of_peak:>9.0%}")
        lines.append("".join(cells))
    return "\n".join(lines)


def speed_table(measured: Sequence[tuple[str, str, Speed]]) -> str:
    """List one line per bundle (name, method, speed): milliseconds by tokens, and the share of the peak."""
    width = max(len(name) for name, _, _ in measured) + 2
    _, _, first = measured[0]
    tokens = "".join(f"{length:>9}" for length in first.map_ms)
    lines = [
        f"milliseconds by tokens; {first.threads} threads, peak of one large float32 product "
        f"{max(speed.peak_gflops for _, _, speed in measured):.0f} GFLOPS",
        f"{'bundle':<{width}}{'method':<12}{tokens}{'ms/1024':>9}{'of peak':>9}",
    ]
    for name, method, speed in measured:
        times = "".join(f"{ms:>9.1f}" for ms in speed.map_ms.values())
        lines.append(f"{name:<{width}}{method:<12}{times}{speed.ms_per_1024:>9.1f}{speed.share_of_peak:>9.0%}")
    return "\n".join(lines)


def _row(name: str, score: ArmScore) -> str:
    interval = f"{score.ppl_low:.3f}-{score.ppl_high:.3f}"
    figures = f"{score.top1:>7.3f}{score.kl_mean:>9.4f}{score.kl_p95:>9.4f}{score.documents:>11}"
    return f"{name}{score.ppl_ratio:>10.4f}  {interval:<16}{figures}"
