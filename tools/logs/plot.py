"""A step function, drawn."""

from __future__ import annotations

import math

from tools.logs.calibration import Isotonic

WIDTH, HEIGHT, MARGIN = 640, 400, 48


def steps(function: Isotonic, threshold: float) -> str:
    """An SVG of agreement (0 to 1) over confidence, with the threshold as a line; without one that is infinite."""
    marks = [threshold] if math.isfinite(threshold) else []
    left = min([function.starts[0], *marks])
    right = max([0.0, function.starts[-1], *marks])
    span = (right - left) or 1.0

    def at(confidence: float, value: float) -> str:
        x = MARGIN + (confidence - left) / span * (WIDTH - 2 * MARGIN)
        return f"{x:.1f},{HEIGHT - MARGIN - value * (HEIGHT - 2 * MARGIN):.1f}"

    ends = [*function.starts[1:], right]
    corners = [
        at(place, value)
        for start, end, value in zip(function.starts, ends, function.values, strict=True)
        for place in (start, end)
    ]
    marked = "".join(f"; at {mark:.3f}" for mark in marks)
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif">',
            f'<polyline points="{at(left, 1)} {at(left, 0)} {at(right, 0)}" fill="none" stroke="black"/>',
            f'<polyline points="{" ".join(corners)}" fill="none" stroke="steelblue" stroke-width="2"/>',
            *(
                f'<polyline points="{at(mark, 0)} {at(mark, 1)}" stroke="firebrick" stroke-dasharray="4"/>'
                for mark in marks
            ),
            f'<text x="{MARGIN}" y="{MARGIN - 16}">agreement with the large model, 0 to 1</text>',
            f'<text x="{MARGIN}" y="{HEIGHT - 16}">confidence, {left:.2f} to {right:.2f}{marked}</text>',
            "</svg>\n",
        )
    )
