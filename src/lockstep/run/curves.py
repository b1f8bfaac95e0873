"""The curves of a run as a small picture: one SVG file, a panel a metric."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

History = Sequence[tuple[int, dict[str, float]]]

# What a reader of a model card looks for first; the others are in metrics.jsonl.
SHOWN = (
    "train/loss",
    "val/loss",
    "critic/score/mean",
    "val/accuracy",
    "val/reward",
    "val/pair_accuracy",
    "val/label_accuracy",
    "val/step_accuracy",
    "response_length/mean",
)
PANELS, WIDTH, HEIGHT, MARGIN = 4, 360, 200, 44
POINTS = 300
"""Of longer curves neighbouring steps are averaged."""


def curves_svg(history: History) -> str | None:
    """None where there is no curve: nothing was logged twice."""
    curves = {name: _points(history, name) for name in SHOWN}
    drawn = [(name, points) for name, points in curves.items() if len(points) > 1][:PANELS]
    if not drawn:
        return None
    columns = min(2, len(drawn))
    rows = -(-len(drawn) // columns)
    panels = "".join(
        f'<g transform="translate({WIDTH * (i % columns)},{HEIGHT * (i // columns)})">{_panel(name, points)}</g>'
        for i, (name, points) in enumerate(drawn)
    )
    width, height = WIDTH * columns, HEIGHT * rows
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="11"><rect width="{width}" height="{height}" fill="#fff"/>{panels}</svg>\n'
    )


def _points(history: History, name: str) -> list[tuple[float, float]]:
    found = [(float(step), metrics[name]) for step, metrics in history if name in metrics]
    return [(step, value) for step, value in found if math.isfinite(value)]


def _panel(name: str, points: list[tuple[float, float]]) -> str:
    each = -(-len(points) // POINTS)
    parts = [points[i : i + each] for i in range(0, len(points), each)]
    shown = [tuple(sum(axis) / len(part) for axis in zip(*part, strict=True)) for part in parts]
    low, high = min(y for _, y in shown), max(y for _, y in shown)
    first, last = shown[0][0], shown[-1][0]
    across, up = (last - first) or 1.0, (high - low) or 1.0
    wide, tall = WIDTH - 2 * MARGIN, HEIGHT - 2 * MARGIN
    places = " ".join(
        f"{MARGIN + wide * (x - first) / across:.1f},{MARGIN + tall * (1 - (y - low) / up):.1f}" for x, y in shown
    )
    mean = f" (mean of {each} steps)" if each > 1 else ""
    bottom, right = HEIGHT - MARGIN, WIDTH - MARGIN
    return (
        f'<text x="{MARGIN}" y="{MARGIN - 12}" font-weight="bold">{escape(name + mean)}</text>'
        f'<path d="M{MARGIN} {MARGIN}V{bottom}H{right}" fill="none" stroke="#999"/>'
        f'<text x="{MARGIN - 4}" y="{MARGIN + 8}" text-anchor="end">{high:.3g}</text>'
        f'<text x="{MARGIN - 4}" y="{bottom}" text-anchor="end">{low:.3g}</text>'
        f'<text x="{MARGIN}" y="{bottom + 14}">step {points[0][0]:.0f}</text>'
        f'<text x="{right}" y="{bottom + 14}" text-anchor="end">{points[-1][0]:.0f}</text>'
        f'<polyline points="{places}" fill="none" stroke="#1f6feb" stroke-width="1.5"/>'
    )
