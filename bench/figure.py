"""Figures in SVG: panels with axes, ticks, a grid, a legend and lines. `evidence.py`, `learning.py` and
`learning_stages.py` draw with it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

LEFT, RIGHT, TOP, BOTTOM = 62, 24, 46, 40  # space around the axes of a panel


@dataclass(frozen=True)
class Line:
    """A curve. Lines with a name are in the legend; `label` stands beside the first point."""

    points: Sequence[tuple[float, float]]
    color: str
    width: float = 1.8
    name: str = ""
    label: str = ""


@dataclass(frozen=True)
class Panel:
    """One pair of axes. `marks` are dashed vertical lines with a text."""

    title: str
    x_title: str
    y_title: str
    lines: Sequence[Line]
    marks: Sequence[tuple[float, str]] = ()


def ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Round numbers, about `wanted` of them; the first is at most `low` and the last at least `high`."""
    if not high > low:
        low, high = low - (abs(low) or 1.0) / 20, high + (abs(high) or 1.0) / 20
    rough = (high - low) / wanted
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [step * at for at in range(first, last + 1)]


def tick_texts(values: Sequence[float]) -> list[str]:
    decimals = max(0, -math.floor(math.log10(values[1] - values[0]) + 1e-9))
    return [f"{value if abs(value) > 1e-12 else 0:,.{decimals}f}" for value in values]


def document(panels: Sequence[Panel], size: tuple[int, int], columns: int = 1) -> str:
    """The panels in rows of `columns`, each of the given width and height."""
    width, height = size
    rows = math.ceil(len(panels) / columns)
    whole = f"{width * min(columns, len(panels))} {height * rows}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {whole}" font-family="sans-serif" font-size="11">'
    drawn = [
        f'<g transform="translate({width * (at % columns)} {height * (at // columns)})">{_panel(panel, size)}</g>'
        for at, panel in enumerate(panels)
    ]
    return "\n".join([head, '<rect width="100%" height="100%" fill="#fff"/>', *drawn, "</svg>\n"])


def _panel(panel: Panel, size: tuple[int, int]) -> str:
    width, height = size
    right, bottom = width - RIGHT, height - BOTTOM
    points = [point for line in panel.lines for point in line.points]
    shown = [*(x for x, _ in points), *(x for x, _ in panel.marks)]
    xs = ticks(min(shown), max(shown), 6)
    ys = ticks(min(y for _, y in points), max(y for _, y in points), 5)

    def x_of(value: float) -> float:
        return LEFT + (value - xs[0]) / (xs[-1] - xs[0]) * (right - LEFT)

    def y_of(value: float) -> float:
        return bottom - (value - ys[0]) / (ys[-1] - ys[0]) * (bottom - TOP)

    grid = "".join(f"M{x_of(x):.1f} {TOP}V{bottom}" for x in xs) + "".join(f"M{LEFT} {y_of(y):.1f}H{right}" for y in ys)
    middle = (TOP + bottom) / 2
    parts = [
        f'<path d="{grid}" stroke="#ddd"/>',
        f'<path d="M{LEFT} {TOP}V{bottom}H{right}" stroke="#444" fill="none"/>',
        _text(LEFT, 15, panel.title, weight="bold"),
        *(_text(x_of(x), bottom + 14, said, "middle") for x, said in zip(xs, tick_texts(xs), strict=True)),
        *(_text(LEFT - 5, y_of(y) + 4, said, "end") for y, said in zip(ys, tick_texts(ys), strict=True)),
        _text((LEFT + right) / 2, height - 8, panel.x_title, "middle"),
        f'<text transform="translate(13 {middle:g}) rotate(-90)" text-anchor="middle" fill="#222">'
        f"{escape(panel.y_title)}</text>",
    ]
    for at, said in panel.marks:
        parts.append(f'<path d="M{x_of(at):.1f} {TOP}V{bottom}" stroke="#777" stroke-dasharray="4"/>')
        parts.append(_text(x_of(at) + 4, bottom - 6, said, color="#555"))
    at_x: float = LEFT
    for line in panel.lines:
        places = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in line.points)
        parts.append(f'<polyline points="{places}" fill="none" stroke="{line.color}" stroke-width="{line.width:g}"/>')
        if line.label:
            x, y = line.points[0]
            parts.append(_text(x_of(x) + 6, y_of(y) + 10, line.label))
        if line.name:
            parts.append(f'<path d="M{at_x:g} 31h18" stroke="{line.color}" stroke-width="{line.width:g}"/>')
            parts.append(_text(at_x + 23, 35, line.name))
            at_x += 30 + 5.4 * len(line.name)
    return "".join(parts)


def _text(x: float, y: float, said: str, anchor: str = "start", *, weight: str = "normal", color: str = "#222") -> str:
    style = f'text-anchor="{anchor}" font-weight="{weight}" fill="{color}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(said)}</text>'
