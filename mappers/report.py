"""An evaluation to look at: one HTML page without anything to fetch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from mappers import plot
from mappers.diagnose import PartScore
from mappers.manifest import ArmScore, Evaluation
from mappers.mapper import Mapper
from mappers.protocol import SPANS
from mappers.speed import Speed

HYBRID = "ppl ratio, hybrid"
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; margin: 1rem 0 } td, th { padding: .2rem .8rem; text-align: right }
td:first-child, th:first-child { text-align: left } tr { border-bottom: 1px solid #ddd }
svg { width: 100%; max-width: 46rem; font: 11px system-ui, sans-serif } .note { color: #666 }
"""


@dataclass(frozen=True)
class EvaluatedBundle:
    """One bundle with all that was measured of it. `name` is what it was asked for by, so that no two are alike."""

    name: str
    mapper: Mapper
    evaluation: Evaluation
    speed: Speed | None = None

    @property
    def cosine(self) -> float | None:
        """Of the attention's outputs, mean over layers."""
        layers = self.evaluation.attention
        return sum(layer.mean for layer in layers) / len(layers) if layers else None

    def as_json(self) -> dict[str, Any]:
        values = {"bundle": self.mapper.bundle_id, **self.evaluation.model_dump(mode="json")}
        values |= {"method": self.mapper.manifest.method, "weight_bytes": self.mapper.weight_bytes}
        return values | ({"speed": self.speed.as_json()} if self.speed else {})


def diagnosis_json(rows: Sequence[PartScore]) -> list[dict[str, Any]]:
    """A diagnosis as JSON."""
    return [{"by": row.by, "part": row.part, **row.score.model_dump(mode="json")} for row in rows]


def page(judged: Sequence[EvaluatedBundle], diagnosis: Sequence[PartScore] = ()) -> str:
    """The whole report; `diagnosis` is that of the first bundle."""
    sections = [_heading(judged[0]), _compared(judged)] if len(judged) > 1 else [_heading(judged[0])]
    sections += [_arms(each) for each in judged]
    sections += [_by_length(judged), _by_layer(judged), _by_distance(judged, diagnosis), _by_time(judged)]
    sections.append(_diagnosed(diagnosis))
    body = "\n".join(section for section in sections if section)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>kvrelay eval</title>'
        f"<style>{STYLE}</style></head><body>\n{body}\n</body></html>\n"
    )


def _heading(first: EvaluatedBundle) -> str:
    manifest, evaluation = first.mapper.manifest, first.evaluation
    return (
        f"<h1>{escape(manifest.source.name)} to {escape(manifest.target.name)}</h1>"
        f'<p class="note">{escape(evaluation.data)}; head {evaluation.head} and tail {evaluation.tail} read natively, '
        f"{evaluation.scored} tokens scored behind each prefix. Ratios are to the target's own cache: 1 is perfect."
        "</p>"
    )


def _compared(judged: Sequence[EvaluatedBundle]) -> str:
    names = ("bundle", "method", "ppl ratio, hybrid", "top-1", "KL p95", "cosine", "MB", "ms per 1,024", "of peak")
    return "<h2>Side by side</h2>" + _table(names, [_cells(each) for each in judged])


def _cells(each: EvaluatedBundle) -> list[str]:
    score = each.evaluation.arm("hybrid")
    quality = [f"{score.ppl_ratio:.4f}", f"{score.top1:.3f}", f"{score.kl_p95:.3f}"] if score else ["", "", ""]
    cosine = "" if each.cosine is None else f"{each.cosine:.4f}"
    speed = [f"{each.speed.ms_per_1024:.1f}", f"{each.speed.share_of_peak:.0%}"] if each.speed else ["", ""]
    return [each.name, each.mapper.manifest.method, *quality, cosine, f"{each.mapper.weight_bytes / 1e6:.2f}", *speed]


def _arms(each: EvaluatedBundle) -> str:
    names = ("arm", "ppl ratio", "95% interval", "top-1", "KL mean", "KL p95", "documents")
    rows = [[score.arm, *_figures(score)] for score in each.evaluation.arms]
    for at in each.evaluation.lengths:
        rows += [[f"hybrid {at.length}", *_figures(score)] for score in at.arms if score.arm == "hybrid"]
    greedy = each.evaluation.greedy
    note = (
        f"<p>Of {greedy.tokens} tokens generated freely, {greedy.agreement:.1%} agree; {greedy.identical:.0%} of "
        f"{greedy.generations} generations are identical.</p>"
        if greedy
        else ""
    )
    return f"<h2>{escape(each.name)}: {escape(each.mapper.manifest.method)}</h2>" + _table(names, rows) + note


def _by_length(judged: Sequence[EvaluatedBundle]) -> str:
    def found(each: EvaluatedBundle) -> list[plot.Point]:
        rows = [(at.length, score) for at in each.evaluation.lengths for score in at.arms if score.arm == "hybrid"]
        return [(length, score.ppl_ratio) for length, score in rows]

    return _plotted("By prefix length", {each.name: found(each) for each in judged}, "tokens of prefix", HYBRID)


def _by_layer(judged: Sequence[EvaluatedBundle]) -> str:
    """The mean of every bundle; of one alone, its worst head as well."""
    series = {each.name: [(row.layer, row.mean) for row in each.evaluation.attention] for each in judged}
    if len(judged) == 1:
        series["its worst head"] = [(row.layer, row.min) for row in judged[0].evaluation.attention]
    return _plotted("Attention by layer", series, "target layer", "cosine of outputs")


def _by_distance(judged: Sequence[EvaluatedBundle], diagnosis: Sequence[PartScore]) -> str:
    """What the attention makes of it; where it was diagnosed, what it costs as well."""
    cosines = {
        each.name: [(SPANS[row.distance][0], row.mean) for row in each.evaluation.by_distance] for each in judged
    }
    rows = [row for row in diagnosis if row.by == "distance"]
    costs = {"mapped alone": [(SPANS[row.part][0], row.score.ppl_ratio) for row in rows]}
    where = "tokens before the native tail"
    return _plotted("Attention by distance", cosines, where, "cosine of outputs") + _plotted(
        "By distance", costs, where, "ppl ratio"
    )


def _by_time(judged: Sequence[EvaluatedBundle]) -> str:
    series = {}
    for each in judged:
        score = each.evaluation.arm("hybrid")
        if score and each.speed:
            series[each.name] = [(each.speed.ms_per_1024, score.ppl_ratio)]
    return _plotted("Quality against time", series, "ms of map per 1,024 tokens", HYBRID, plot.points)


def _diagnosed(diagnosis: Sequence[PartScore]) -> str:
    if not diagnosis:
        return ""
    names = ("mapped alone", "ppl ratio", "95% interval", "top-1", "KL mean", "KL p95", "documents")
    rows = [[f"{row.by} {row.part}", *_figures(row.score)] for row in diagnosis]
    return "<h2>Where the error lies</h2>" + _table(names, rows)


def _plotted(
    title: str,
    series: Mapping[str, Sequence[plot.Point]],
    x_name: str,
    y_name: str,
    draw: Callable[[Mapping[str, Sequence[plot.Point]], str, str], str] = plot.lines,
) -> str:
    """A section with a plot, or nothing where nothing was measured."""
    found = {name: points for name, points in series.items() if points}
    return f"<h2>{title}</h2>{draw(found, x_name, y_name)}" if found else ""


def _figures(score: ArmScore) -> list[str]:
    interval = f"{score.ppl_low:.3f} to {score.ppl_high:.3f}"
    documents = "" if score.documents is None else str(score.documents)
    kl = f"{score.kl_mean:.4f}", f"{score.kl_p95:.4f}"
    return [f"{score.ppl_ratio:.4f}", interval, f"{score.top1:.3f}", *kl, documents]


def _table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"
