"""Plots as SVG text: lines over a numeric axis, and labelled points. No more than a report needs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

Point = tuple[float, float]

WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 64, 160, 16, 44  # margins; series are named in the right one
COLOURS = ("#2166ac", "#b2182b", "#1b7837", "#762a83", "#e08214", "#35978f", "#7f7f7f")


def lines(series: Mapping[str, Sequence[Point]], x_name: str, y_name: str) -> str:
    """Each series as a line with its points marked."""
    return _plot(series, x_name, y_name, joined=True)


def points(series: Mapping[str, Sequence[Point]], x_name: str, y_name: str) -> str:
    """Each series as points alone."""
    return _plot(series, x_name, y_name, joined=False)


def ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Round numbers that cover `[low, high]` in about so many steps."""
    step = _round_step((high - low) / wanted)
    first = math.floor(low / step)
    count = math.ceil(high / step - 1e-9) - first
    return [round((first + i) * step, 10) for i in range(max(count, 1) + 1)]


def _plot(series: Mapping[str, Sequence[Point]], x_name: str, y_name: str, joined: bool) -> str:
    frame = _Frame([point for found in series.values() for point in found])
    parts = [frame.axes(x_name, y_name)]
    for index, (name, found) in enumerate(series.items()):
        colour = COLOURS[index % len(COLOURS)]
        places = [frame.place(point) for point in found]
        if joined and len(places) > 1:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
            parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places]
        at = TOP + 14 + 16 * index
        parts.append(f'<text x="{WIDTH - RIGHT + 12}" y="{at}" fill="{colour}">{escape(name)}</text>')
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(parts)}</svg>'


class _Frame:
    """Where values stand on the page."""

    def __init__(self, found: Sequence[Point]):
        self._x, self._y = (_axis([point[i] for point in found]) for i in (0, 1))

    def place(self, point: Point) -> Point:
        x = LEFT + (WIDTH - LEFT - RIGHT) * _share(point[0], self._x)
        y = HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * _share(point[1], self._y)
        return x, y

    def axes(self, x_name: str, y_name: str) -> str:
        parts = []
        for value in self._y:
            _, y = self.place((self._x[0], value))
            parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
            parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
        for value in self._x:
            x, _ = self.place((value, self._y[0]))
            parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{value:g}</text>')
        middle = (TOP + HEIGHT - BOTTOM) / 2
        parts.append(
            f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x_name)}</text>'
            f'<text transform="translate(14 {middle}) rotate(-90)" text-anchor="middle">{escape(y_name)}</text>'
        )
        return "".join(parts)


def _axis(values: Sequence[float]) -> list[float]:
    low, high = min(values), max(values)
    if high - low < 1e-9 * max(1.0, abs(high)):
        margin = 0.1 * abs(high) or 1.0  # one value: it stands in the middle
        low, high = low - margin, high + margin
    return ticks(low, high)


def _share(value: float, axis: Sequence[float]) -> float:
    return (value - axis[0]) / (axis[-1] - axis[0])


def _round_step(step: float) -> float:
    """The smallest of 1, 2, 5 times a power of ten that is no less."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= step * (1 - 1e-9))
