"""The page of a comparison: one html file that holds its data, style and script, and opens offline."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from lockstep.page import resource, script_of, style_of
from lockstep.parity.compare.comparison import Comparison, Metric

HERE = "lockstep.parity.compare"
SCRIPTS = (
    "figures.js",
    "pair.js",
    "chart.js",
    "explorer.js",
    "headline.js",
    "table.js",
    "sections.js",
    "page.js",
)

# Up to this many points the page holds the curves as they are, which is a few MB; above it they are rounded.
EXACT_POINTS = 200_000
ROUNDED_DIGITS = 7


def write_report(comparison: Comparison, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(comparison), encoding="utf-8")


def page(comparison: Comparison) -> str:
    parts = {
        "style": style_of(HERE, ["page.css"]),
        "script": script_of(HERE, SCRIPTS),
        "data": _inline_json(page_data(comparison)),
    }
    # One pass: a part may hold anything, also what looks like the place of another.
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], resource(HERE, "template.html"))


def page_data(comparison: Comparison) -> dict[str, Any]:
    """`as_json()` made strict (null for NaN and infinities), with lists of steps that metrics share written once."""
    bare = [replace(metric, steps=[], a=[], b=[], repeats=[]) for metric in comparison.metrics]
    data: dict[str, Any] = strict(replace(comparison, metrics=bare).as_json())
    points = sum(_points(metric) for metric in comparison.metrics)
    digits = None if points <= EXACT_POINTS else ROUNDED_DIGITS
    shared: dict[tuple[int, ...], int] = {}
    for metric, values in zip(comparison.metrics, data["metrics"], strict=True):
        values["steps"] = shared.setdefault(tuple(metric.steps), len(shared))
        values["a"], values["b"] = curve(metric.a, digits), curve(metric.b, digits)
        values["repeats"] = [curve(repeat, digits) for repeat in metric.repeats]
    return {**data, "steps": [list(steps) for steps in shared], "rounded_to": digits}


def curve(values: list[float | None], digits: int | None) -> list[float | None]:
    """Every point, or null where it is no number, rounded to so many significant digits."""
    finite = [value if value is not None and math.isfinite(value) else None for value in values]
    if digits is None:
        return finite
    return [None if value is None else float(f"{value:.{digits}g}") for value in finite]


def strict(value: Any) -> Any:
    """The value as strict JSON can say it."""
    if isinstance(value, dict):
        return {str(key): strict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


def _points(metric: Metric) -> int:
    return len(metric.steps) * (2 + len(metric.repeats))


def _inline_json(data: dict[str, Any]) -> str:
    """Without any `<`: neither `</script>` nor `<!--` in a sample's text can end the element that holds it."""
    return json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
